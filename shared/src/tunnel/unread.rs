//! What the streams of one connection hold: bytes that were received and not yet passed on.

use std::cell::RefCell;
use std::rc::Rc;

use h2::{FlowControl, RecvStream};
use slab::Slab;

/// The received bodies of one connection.
#[derive(Default)]
pub struct Held(Rc<RefCell<Slab<FlowControl>>>);

/// A body that counts. Drop it with the body: until then its stream stays open.
pub struct Watched {
    bodies: Rc<RefCell<Slab<FlowControl>>>,
    key: usize,
}

impl Held {
    pub fn watch(&self, body: &mut RecvStream) -> Watched {
        let key = self.0.borrow_mut().insert(body.flow_control().clone());
        Watched { bodies: Rc::clone(&self.0), key }
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

impl Drop for Watched {
    fn drop(&mut self) {
        let flow = self.bodies.borrow_mut().try_remove(self.key);
        // Not while the others are borrowed: the last reference to a stream ends it.
        drop(flow);
    }
}
