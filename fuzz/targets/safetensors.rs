//! The header of a safetensors file: any bytes are refused, or describe tensors within the file.

#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;

/// As much data as the fixture has.
const DATA_BYTES: usize = 104_000;

/// The input is the header; its length goes before it, data after it.
fuzz_target!(|header: &[u8]| {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + data_length(header), 0);
    std::fs::write(common::DIRECTORY.join("model.safetensors"), file).expect("the weights are written");
    common::try_model();
});

/// The end of the last tensor, so that the length of the file fits its header.
fn data_length(header: &[u8]) -> usize {
    let Ok(header) = serde_json::from_slice::<serde_json::Value>(header) else {
        return DATA_BYTES;
    };
    let tensors = header.as_object().into_iter().flatten();
    let ends = tensors.filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64());
    ends.max().unwrap_or_default().min(1 << 20) as usize
}
