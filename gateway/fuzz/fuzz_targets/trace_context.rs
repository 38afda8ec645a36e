#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gw_gateway::fuzz_support::trace_context(data));
