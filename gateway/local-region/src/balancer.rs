//! A load balancer: passes each connection to a node that accepts it.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A running balancer. It runs as long as the process.
pub struct Balancer {
    pub address: SocketAddr,
    nodes: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Balancer {
    /// Starts the balancer on a free port.
    pub fn start(nodes: Vec<SocketAddr>) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let nodes = Arc::new(Mutex::new(nodes));
        let known = Arc::clone(&nodes);
        spawn(move || balance(&listener, &known))?;
        Ok(Self { address, nodes })
    }

    pub fn add(&self, node: SocketAddr) {
        lock(&self.nodes).push(node);
    }

    /// Passes new connections to these nodes only.
    pub fn set(&self, nodes: Vec<SocketAddr>) {
        *lock(&self.nodes) = nodes;
    }
}

fn lock(nodes: &Mutex<Vec<SocketAddr>>) -> MutexGuard<'_, Vec<SocketAddr>> {
    nodes.lock().unwrap_or_else(PoisonError::into_inner)
}

fn balance(listener: &TcpListener, nodes: &Mutex<Vec<SocketAddr>>) {
    for client in listener.incoming().flatten() {
        // Another node each time. The client sees a closed connection if there is none, and tries
        // again.
        let nodes = {
            let mut nodes = lock(nodes);
            let count = nodes.len();
            nodes.rotate_left(1.min(count));
            nodes.clone()
        };
        let node = nodes.iter().find_map(|node| TcpStream::connect(node).ok());
        if let Some(error) = node.and_then(|node| pass(&client, &node).err()) {
            tracing::warn!(%error, "the balancer cannot pass a connection");
        }
    }
}

/// Passes bytes in both directions until both have ended.
fn pass(client: &TcpStream, node: &TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    node.set_nodelay(true)?;
    for (from, to) in [(client, node), (node, client)] {
        let mut from = from.try_clone()?;
        let mut to = to.try_clone()?;
        spawn(move || {
            // An error of one side ends the connection for both.
            let how = if io::copy(&mut from, &mut to).is_ok() {
                Shutdown::Write
            } else {
                Shutdown::Both
            };
            let _ = to.shutdown(how);
        })?;
    }
    Ok(())
}

fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name("gw-balancer".into())
        .spawn(run)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn connections_go_to_nodes_that_accept_them() {
        let lost = TcpListener::bind("127.0.0.1:0").unwrap();
        let node = TcpListener::bind("127.0.0.1:0").unwrap();
        let balancer =
            Balancer::start(vec![lost.local_addr().unwrap(), node.local_addr().unwrap()]).unwrap();
        drop(lost);
        for _ in 0..3 {
            let mut agent = TcpStream::connect(balancer.address).unwrap();
            let (mut accepted, _) = node.accept().unwrap();
            agent.write_all(b"question").unwrap();
            agent.shutdown(Shutdown::Write).unwrap();
            let mut text = String::new();
            accepted.read_to_string(&mut text).unwrap();
            accepted.write_all(b"answer").unwrap();
            drop(accepted);
            agent.read_to_string(&mut text).unwrap();
            assert_eq!(text, "questionanswer");
        }
    }
}
