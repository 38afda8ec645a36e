//! A blocking HTTP/1.1 peer: parses messages strictly and sends any bytes.

use std::collections::BTreeMap;

use gw_shared::http::Fields;

pub(crate) use gw_bed::threads::*;

/// Fields as a sorted map, for comparison.
pub(crate) fn fields(headers: &Fields) -> BTreeMap<String, String> {
    headers
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect()
}
