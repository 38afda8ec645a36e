//! Snapshots that the control plane replaces as a whole, and how a worker learns of newer ones.

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Makes a worker use what was published since its last look, at the price of one atomic load if
/// there is nothing. Set once the worker is built.
#[derive(Default)]
pub(crate) struct UseNewer(pub(crate) OnceCell<Box<dyn Fn()>>);

/// The snapshot that one worker uses now. The outer `Rc` keeps requests off the atomic count, which
/// all cores share.
#[expect(
    clippy::redundant_allocation,
    reason = "the inner count is atomic and shared by all cores"
)]
pub(crate) struct Current<T> {
    snapshot: RefCell<Rc<Arc<T>>>,
    use_newer: Rc<UseNewer>,
}

impl<T> Current<T> {
    pub(crate) fn new(snapshot: Arc<T>, use_newer: &Rc<UseNewer>) -> Rc<Self> {
        Rc::new(Self {
            snapshot: RefCell::new(Rc::new(snapshot)),
            use_newer: Rc::clone(use_newer),
        })
    }

    /// The last published snapshot, once the worker uses all publications so far: what is decided
    /// by it respects every change that was answered before. Borrows parts of the worker, which the
    /// caller must not hold.
    #[expect(clippy::redundant_allocation, reason = "as the field")]
    pub(crate) fn get(&self) -> Rc<Arc<T>> {
        if let Some(use_newer) = self.use_newer.0.get() {
            use_newer();
        }
        self.in_use()
    }

    /// The snapshot in use, without a look for a newer one, for callers that borrow parts of the
    /// worker.
    #[expect(clippy::redundant_allocation, reason = "as the field")]
    pub(crate) fn in_use(&self) -> Rc<Arc<T>> {
        Rc::clone(&self.snapshot.borrow())
    }

    pub(crate) fn replace(&self, snapshot: Arc<T>) {
        self.snapshot.replace(Rc::new(snapshot));
    }
}
