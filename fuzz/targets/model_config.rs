//! `config.json` of a model: any bytes are refused, or describe the weights next to it.

#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|config: &[u8]| {
    std::fs::write(common::DIRECTORY.join("config.json"), config).expect("the configuration is written");
    common::try_model();
});
