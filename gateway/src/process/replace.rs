//! Replacing a gateway by a successor process, as the predecessor.

use std::collections::BTreeMap;

use super::gateway::Gateway;
use super::takeover::{Program, Successor, TakeoverError};
use crate::limit::SuccessorBuckets;
use crate::worker::{Message, Succeeded};

impl Gateway {
    /// Starts `program` beside this process and gives it listeners and store; what is left to do here then is to drain.
    /// Returns its process id. On an error nothing has changed.
    pub(super) fn hand_over(&mut self, program: Option<&Program>) -> Result<u32, TakeoverError> {
        let (Some(program), Some(listeners)) = (program, &self.listeners) else { return Err(TakeoverError::NoProgram) };
        if std::process::id() == 1 {
            return Err(TakeoverError::FirstProcess);
        }
        let mut successor = Successor::start(program, listeners)?;
        let id = successor.id().unwrap_or_default();
        successor.wait_until_ready()?;
        let errands = self.pause_control_plane();
        let given = match successor.give_store(self.live_tunnels()) {
            Ok(()) => {
                self.give_buckets(successor);
                Ok(())
            }
            Err(error) => {
                // Ended: the store is free.
                drop(successor);
                Err(error)
            }
        };
        if given.is_err()
            && let Err(error) = self.control.reopen_store()
        {
            tracing::error!(%error, "the store does not open again: requests are served, but nothing can be changed");
        }
        // After a success too: what waits is told to try again.
        let resumed = errands.map_or(Ok(()), |errands| self.serve_errands(errands));
        let resumed = resumed.and_then(|()| if given.is_err() { self.serve_admin() } else { Ok(()) });
        if let Err(error) = resumed {
            tracing::error!(%error, "the control plane does not go on");
        }
        self.has_successor = given.is_ok();
        given.map(|()| id)
    }

    /// Has the successor admit all requests from here on, those of this process included.
    fn give_buckets(&self, successor: Successor) {
        let (buckets, charges) = SuccessorBuckets::new();
        let levels =
            self.bucket_levels(|levels| Message::Succeeded(Box::new(Succeeded { buckets: buckets.clone(), levels })));
        if let Err(error) = successor.follow(levels, charges, &self.control, &self.peers) {
            tracing::warn!(%error, "the successor is gone: no more requests are taken, running ones may end");
            self.peers.tell_all(|| Message::End);
        }
    }

    /// By label of their service, how many tunnels take requests.
    fn live_tunnels(&self) -> BTreeMap<String, usize> {
        let mut tunnels = BTreeMap::new();
        for tunnel in self.control.reports().into_iter().flat_map(|report| report.tunnels) {
            if !tunnel.draining {
                *tunnels.entry(tunnel.service).or_default() += 1;
            }
        }
        tunnels
    }
}
