//! The links to the process that has taken over from this one, one after the other: a worker there
//! that starts again after a panic serves the next one.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use gw_shared::net::{Closer, Socket};
use gw_shared::runtime;

use super::cross_node::Link;

#[derive(Default)]
pub(crate) struct SuccessorLinks {
    /// The last one that was opened, and what ends it.
    opened: RefCell<Option<(Rc<Link>, Closer)>>,
    /// Sockets of the next ones, in the order in which they are served.
    spare: RefCell<VecDeque<Socket>>,
    /// A task drives the links.
    is_driven: Cell<bool>,
}

impl SuccessorLinks {
    /// Opens a link to the process at the other end of `socket`, once those before have ended.
    pub(crate) fn add(self: &Rc<Self>, socket: Socket) {
        self.spare.borrow_mut().push_back(socket);
        if !self.is_driven.replace(true) {
            let mut next = self.next();
            let driven = Rc::clone(self);
            runtime::spawn(async move {
                while let Some((link, socket)) = next {
                    if !link.drive_to_successor(&socket).await {
                        driven.spare.take();
                    }
                    // At once: what waited for the link finds the next one.
                    next = driven.next();
                }
                driven.is_driven.set(false);
            });
        }
    }

    fn next(&self) -> Option<(Rc<Link>, Socket)> {
        let socket = self.spare.borrow_mut().pop_front()?;
        let link = Link::to_successor();
        self.opened
            .replace(Some((Rc::clone(&link), socket.closer())));
        Some((link, socket))
    }

    /// The link for requests, which may have ended.
    pub(super) fn link(&self) -> Option<Rc<Link>> {
        let opened = self.opened.borrow();
        opened.as_ref().map(|(link, _)| Rc::clone(link))
    }

    /// Ends the link.
    pub(crate) fn cut(&self) {
        self.spare.take();
        if let Some((_, connection)) = &*self.opened.borrow() {
            connection.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use gw_shared::runtime::Driver;
    use gw_shared::tunnel::connection::Tunnel;
    use gw_shared::tunnel::endpoint::Endpoint;

    use super::*;

    fn socket(stream: UnixStream) -> Socket {
        Socket::from_unix(stream.into()).unwrap()
    }

    /// Serves a link until it is open at the other end, and then panics, as a worker may.
    async fn open_and_lose(theirs: UnixStream, links: &SuccessorLinks) {
        let theirs = socket(theirs);
        let tunnel = Tunnel::new(Endpoint::agent(1));
        let mut driven = Box::pin(std::future::poll_fn(|cx| {
            tunnel.poll_drive(cx, &theirs, &mut |_| Ok(()))
        }));
        let link = links.link().unwrap();
        tokio::select! {
            _ = &mut driven => panic!("the link has ended"),
            opened = link.tunnel() => assert!(opened.is_ok()),
        }
        drop(driven);
        drop(theirs);
        while link.is_open() {
            runtime::sleep(Duration::from_millis(1)).await;
        }
    }

    #[test]
    fn the_next_link_is_opened_when_a_worker_of_the_successor_has_panicked() {
        Driver::choose()
            .unwrap()
            .block_on(async {
                let links = Rc::new(SuccessorLinks::default());
                let (ours, theirs): (Vec<_>, Vec<_>) = [(); 2]
                    .map(|()| UnixStream::pair().unwrap())
                    .into_iter()
                    .unzip();
                for ours in ours {
                    links.add(socket(ours));
                }
                for theirs in theirs {
                    open_and_lose(theirs, &links).await;
                }
                assert!(links.link().unwrap().tunnel().await.is_err());
            })
            .unwrap();
    }
}
