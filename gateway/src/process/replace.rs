//! Replacement of this process by a successor.

use std::collections::BTreeMap;

use gw_control_plane::members::{CarriedNode, Members};
use gw_data_plane::worker::{Succeeded, WorkerMessage};
use gw_interface::rate_limit::SuccessorBuckets;

use super::gateway::Gateway;
use super::takeover::{self, Program, Successor, TakeoverError};

impl Gateway {
    /// Starts `program` beside this process and hands over listeners, store and buckets. Afterwards
    /// this process only has to drain. Returns the process id of the successor. On an error this
    /// process continues as before.
    pub(super) fn replace(&mut self, program: Option<&Program>) -> Result<u32, TakeoverError> {
        let (Some(program), Some(listeners)) = (program, &self.listeners) else {
            return Err(TakeoverError::NoProgram);
        };
        if std::process::id() == 1 {
            return Err(TakeoverError::FirstProcess);
        }
        let mut successor = Successor::start(program, listeners, self.handles.mailboxes.len())?;
        let id = successor.id().unwrap_or_default();
        successor.wait_until_ready()?;
        self.pause_control_plane();
        let carried = self.node.members.take().and_then(Members::hand_over);
        let membership = carried.clone().map(CarriedNode::from);
        let given =
            match successor.give_store(self.live_tunnels(), membership, self.control.position()) {
                Ok(()) => {
                    self.hand_over_buckets(successor);
                    Ok(())
                }
                Err(error) => {
                    // Kills the successor, which releases the store.
                    drop(successor);
                    Err(error)
                }
            };
        if given.is_err()
            && let Err(error) = self.control.reopen_store()
        {
            tracing::error!(%error,
                "cannot reopen the store: administration fails until the gateway is restarted");
        }
        // After a success too: waiting jobs get the answer to try again.
        self.serve_jobs();
        if given.is_err()
            && let Err(error) = self
                .start_members(carried)
                .and_then(|()| self.serve_administration())
        {
            tracing::error!(%error, "cannot resume the control plane; restart the gateway");
        }
        self.drain.has_successor = given.is_ok();
        if self.drain.has_successor {
            // Nodes that still connect here try again, and reach the successor.
            self.node.waiting = None;
        }
        given.map(|()| id)
    }

    /// Hands the buckets over: from here on the successor admits the requests of this process too.
    fn hand_over_buckets(&self, mut successor: Successor) {
        successor.link(&self.handles);
        let (buckets, charges) = SuccessorBuckets::new();
        let levels = self.bucket_levels(|levels| {
            WorkerMessage::Succeeded(Box::new(Succeeded {
                buckets: buckets.clone(),
                levels,
            }))
        });
        let followed = successor.follow(levels, charges, &self.control, &self.tasks.helpers);
        if let Err(error) = followed {
            tracing::warn!(%error, "{}", takeover::FOLLOWS_NO_MORE);
        }
    }

    /// Number of tunnels that take requests, by label of their service. A service without one has
    /// one if its agent is expected within seconds.
    pub(super) fn live_tunnels(&self) -> BTreeMap<String, usize> {
        let mut tunnels = BTreeMap::new();
        let reports = self.control.reports().into_iter();
        for tunnel in reports.flat_map(|report| report.tunnels) {
            if !tunnel.draining {
                *tunnels.entry(tunnel.service).or_default() += 1;
            }
        }
        let awaited = self.handles.ask_all(WorkerMessage::ReportAwaited);
        for service in awaited.into_iter().flatten() {
            tunnels.entry(service).or_insert(1);
        }
        tunnels
    }
}
