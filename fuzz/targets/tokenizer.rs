//! `tokenizer.json`: any bytes are refused, or a tokenizer whose tokens the model can read.
//!
//! The tokenizers library panics on some files. Those panics are expected, and must reach the caller as
//! errors; any other panic is a finding.

#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: {
        let abort = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let of_library = panic
                .location()
                .is_some_and(|location| location.file().contains("/tokenizers-"));
            if !of_library {
                abort(panic);
            }
        }));
    },
    |tokenizer: &[u8]| {
        std::fs::write(common::DIRECTORY.join("tokenizer.json"), tokenizer)
            .expect("the tokenizer is written");
        common::try_model();
    }
);
