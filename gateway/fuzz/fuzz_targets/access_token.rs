#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gw_gateway_fuzz::access_token(data));
