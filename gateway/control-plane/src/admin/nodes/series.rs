//! The time series of all nodes, added.

use std::sync::Arc;

use gw_telemetry::timeseries::{SeriesCounts, SeriesPlan};

use super::ask::{LOG_WITHIN, target};
use crate::admin::{Admin, NoResult};
use crate::control::{Control, ControlError};

impl Admin {
    /// Adds the counts of all nodes. Also returns the slots of nodes that do not answer; without
    /// `partial` that is an error.
    pub(in crate::admin) async fn counts(
        &self,
        plan: &SeriesPlan,
        partial: bool,
    ) -> Result<(SeriesCounts, Vec<u16>), NoResult> {
        let nodes = self.other_nodes();
        let target = target("/v1/series", plan);
        let asked = plan.clone();
        let series = Arc::clone(&self.series);
        let read = move |control: &Control| series.counts(&asked, &control.directory());
        let here = self.clone().run(read);
        let (here, (others, missing)) = tokio::join!(
            here,
            self.ask_nodes::<SeriesCounts>(&nodes, &target, LOG_WITHIN)
        );
        let mut sum = here?.map_err(ControlError::from)?;
        if !missing.is_empty() && !partial {
            return Err(ControlError::NodesUnavailable(missing).into());
        }
        others.iter().for_each(|other| sum.add(other));
        Ok((sum, missing.iter().map(|node| node.slot).collect()))
    }
}
