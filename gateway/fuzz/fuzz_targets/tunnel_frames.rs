#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gw_gateway::support::fuzz::tunnel_frames(data));
