#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gw_control_plane::fuzz_support::backup_file(data));
