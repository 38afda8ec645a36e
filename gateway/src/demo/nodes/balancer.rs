//! A load balancer for the demo's agent: passes each connection to a node that accepts it.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};

/// Starts the balancer on a free port. It runs as long as the process.
pub(super) fn start(nodes: Vec<SocketAddr>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    spawn(move || balance(&listener, nodes))?;
    Ok(address)
}

fn balance(listener: &TcpListener, mut nodes: Vec<SocketAddr>) {
    for agent in listener.incoming().flatten() {
        // Another node each time. The agent sees a closed connection if there is none, and tries again.
        nodes.rotate_left(1);
        let node = nodes.iter().find_map(|node| TcpStream::connect(node).ok());
        if let Some(error) = node.and_then(|node| pass(&agent, &node).err()) {
            tracing::warn!(%error, "the balancer cannot pass a connection");
        }
    }
}

/// Passes bytes in both directions until both have ended.
fn pass(agent: &TcpStream, node: &TcpStream) -> io::Result<()> {
    agent.set_nodelay(true)?;
    node.set_nodelay(true)?;
    for (from, to) in [(agent, node), (node, agent)] {
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
        let balancer = start(vec![lost.local_addr().unwrap(), node.local_addr().unwrap()]).unwrap();
        drop(lost);
        for _ in 0..3 {
            let mut agent = TcpStream::connect(balancer).unwrap();
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
