#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gw_data_plane::support::fuzz::agent_program(data));
