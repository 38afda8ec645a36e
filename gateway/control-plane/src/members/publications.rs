//! Publication of views to the workers: which view which worker uses.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use gw_interface::workers::ViewApplied;
use gw_region::View;
use gw_region::owners::ownership::WorkerId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Views that not all workers use yet, the oldest first.
pub(super) struct Publications {
    next: u64,
    sender: UnboundedSender<ViewApplied>,
    pub(super) applied: UnboundedReceiver<ViewApplied>,
    open: VecDeque<Publication>,
}

struct Publication {
    number: u64,
    view: Arc<View>,
    /// Workers that do not use it yet. One that starts again uses it a second time.
    waiting: BTreeSet<usize>,
}

impl Publications {
    pub(super) fn new() -> Self {
        let (sender, applied) = unbounded_channel();
        Self {
            next: 1,
            sender,
            applied,
            open: VecDeque::new(),
        }
    }

    /// Returns the number of the publication, and where the workers answer.
    pub(super) fn begin(
        &mut self,
        view: Arc<View>,
        workers: usize,
    ) -> (u64, UnboundedSender<ViewApplied>) {
        let number = self.next;
        self.next += 1;
        self.open.push_back(Publication {
            number,
            view,
            waiting: (0..workers).collect(),
        });
        (number, self.sender.clone())
    }

    /// A worker uses the view with this number. Returns the view, and whether all workers use it
    /// now.
    pub(super) fn applied(&mut self, number: u64, worker: WorkerId) -> Option<(Arc<View>, bool)> {
        let publication = self.open.iter_mut().find(|open| open.number == number)?;
        publication.waiting.remove(&worker.0);
        let view = Arc::clone(&publication.view);
        let is_last = publication.waiting.is_empty();
        if is_last {
            // Each worker uses views in order.
            self.open.retain(|open| open.number > number);
        }
        Some((view, is_last))
    }
}
