//! The accounts and services that have the names in records.

use std::sync::Arc;

use gw_store::{Directory, Incarnation};

/// Returns the directory of a gateway. A log without a gateway has none, and shows all of its
/// records.
#[derive(Clone, Default)]
pub struct Names(pub Option<Arc<dyn Fn() -> Directory + Send + Sync>>);

/// The accounts and services of one moment. Everything that reads records needs them.
pub(crate) struct NamesNow(Option<Directory>);

impl Names {
    pub(super) fn now(&self) -> NamesNow {
        NamesNow(self.0.as_ref().map(|directory| directory()))
    }
}

impl NamesNow {
    /// Returns what is shown of the captured messages of a record, by their key; `None` if the
    /// record is not shown.
    pub(super) fn shown(&self, label: &str, ms: u64, capture: Option<i64>) -> Option<Option<i64>> {
        let directory = self.0.as_ref();
        match directory.map_or(Incarnation::Current, |it| it.incarnation(label, ms)) {
            Incarnation::Current => Some(capture),
            Incarnation::Deleted => Some(None),
            Incarnation::Earlier => None,
        }
    }
}
