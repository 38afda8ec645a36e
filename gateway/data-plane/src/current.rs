//! A snapshot that the control plane replaces as a whole.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The snapshot that one worker uses now. The outer `Rc` keeps requests off the atomic count, which all cores share.
#[expect(
    clippy::redundant_allocation,
    reason = "the inner count is atomic and shared by all cores"
)]
pub(crate) struct Current<T>(RefCell<Rc<Arc<T>>>);

impl<T> Current<T> {
    pub(crate) fn new(snapshot: Arc<T>) -> Rc<Self> {
        Rc::new(Self(RefCell::new(Rc::new(snapshot))))
    }

    #[expect(clippy::redundant_allocation, reason = "as the field")]
    pub(crate) fn get(&self) -> Rc<Arc<T>> {
        Rc::clone(&self.0.borrow())
    }

    pub(crate) fn replace(&self, snapshot: Arc<T>) {
        self.0.replace(Rc::new(snapshot));
    }
}
