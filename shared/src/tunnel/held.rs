//! What the streams of one connection hold: bytes that were received and not yet passed on.

use std::cell::RefCell;

use h2::RecvStream;
use slab::Slab;

/// The received bodies of one connection.
#[derive(Default)]
pub struct Held(RefCell<Slab<h2::FlowControl>>);

/// A body's place. Give it back with [`Held::forget`] when the body is dropped: until then its stream stays open.
#[derive(Debug)]
pub struct HeldKey(usize);

impl Held {
    pub fn watch(&self, body: &mut RecvStream) -> HeldKey {
        HeldKey(self.0.borrow_mut().insert(body.flow_control().clone()))
    }

    pub fn forget(&self, key: HeldKey) {
        let flow = self.0.borrow_mut().try_remove(key.0);
        drop(flow);
    }

    /// How many bodies there are.
    pub fn streams(&self) -> usize {
        self.0.borrow().len()
    }

    /// Bytes that each body holds, without those that hold none.
    pub fn bytes(&self) -> Vec<usize> {
        self.0.borrow().iter().map(|(_, flow)| flow.used_capacity()).filter(|held| *held > 0).collect()
    }
}
