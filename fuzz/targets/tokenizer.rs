//! `tokenizer.json`: any bytes are refused, or a tokenizer whose tokens the model can read.

#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|tokenizer: &[u8]| {
    std::fs::write(common::DIRECTORY.join("tokenizer.json"), tokenizer).expect("the tokenizer is written");
    common::try_model();
});
