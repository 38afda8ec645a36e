//! Unread bytes of a connection's streams: received and not yet relayed.

use std::cell::RefCell;
use std::rc::Rc;

use h2::{FlowControl, RecvStream};
use slab::Slab;

/// Received bodies of a connection and their unread bytes.
#[derive(Default)]
pub struct UnreadBodies(Rc<RefCell<Slab<FlowControl>>>);

/// Counts one body. Keeps its stream open, so drop it with the body.
pub struct UnreadBody {
    bodies: Rc<RefCell<Slab<FlowControl>>>,
    key: usize,
}

impl UnreadBodies {
    /// Counts the unread bytes of `body` from now on.
    pub fn watch(&self, body: &mut RecvStream) -> UnreadBody {
        let key = self.0.borrow_mut().insert(body.flow_control().clone());
        UnreadBody { bodies: Rc::clone(&self.0), key }
    }

    /// Number of bodies.
    pub fn streams(&self) -> usize {
        self.0.borrow().len()
    }

    /// Unread bytes of each body that has any.
    pub fn bytes(&self) -> Vec<usize> {
        self.0.borrow().iter().map(|(_, flow)| flow.used_capacity()).filter(|unread| *unread > 0).collect()
    }
}

impl Drop for UnreadBody {
    fn drop(&mut self) {
        let flow = self.bodies.borrow_mut().try_remove(self.key);
        // Dropped outside the borrow: dropping the last reference to a stream ends it.
        drop(flow);
    }
}
