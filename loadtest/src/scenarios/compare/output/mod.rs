//! Output of the figures: a table, JSON and a chart.

pub(super) mod json;
pub(super) mod svg;
pub(super) mod table;
