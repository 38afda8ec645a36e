//! Findings about domains that DNS does not prove.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use gw_control_plane::control::changes::audit;
use gw_control_plane::control::records::domain;
use gw_control_plane::control::{Actor, Control, NewDomain};
use gw_gateway::Gateway;
use gw_interface::config::Config;
use gw_store::{AuditQuery, DomainState};

use super::DOMAIN;
use crate::support::processes::process::config_text;
use crate::support::setup;

/// Looks of the gateway at DNS.
const LOOKS: usize = 30;
/// TXT (RFC 1035 §3.2.2).
const TXT: u8 = 16;

/// Starts a server that answers questions about TXT records with another text each time, and every
/// third one with a failure, until the test ends. Other questions get no record. Returns its
/// address.
fn changing_dns() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut message = [0; 1500];
        let mut asked = 0;
        while let Ok((_, peer)) = socket.recv_from(&mut message) {
            let end = 12 + message[12..].iter().position(|byte| *byte == 0).unwrap() + 5;
            let mut answer = message[..end].to_vec();
            // QR, RD and RA; no records (RFC 1035 §4.1.1).
            (answer[2], answer[3]) = (0x81, 0x80);
            answer[6..12].fill(0);
            if answer[end - 3] == TXT {
                asked += 1;
                let text = format!("text {asked}");
                let length = u8::try_from(text.len()).unwrap();
                match asked % 3 {
                    // The server fails.
                    0 => answer[3] |= 2,
                    _ => {
                        answer[7] = 1;
                        answer.extend([0xC0, 12, 0, TXT, 0, 1, 0, 0, 0, 1, 0, length + 1, length]);
                        answer.extend(text.into_bytes());
                    }
                }
            }
            drop(socket.send_to(&answer, peer));
        }
    });
    address
}

/// Number of the newest entry of the audit log, which is the number of the newest change.
fn newest_entry(control: &Control) -> i64 {
    let query = AuditQuery {
        account: None,
        before: None,
        limit: 1,
    };
    audit::list(control, &query).unwrap().items[0].number
}

#[test]
fn a_dns_server_that_answers_with_another_text_at_each_look_makes_no_change() {
    let directory = tempfile::tempdir().unwrap();
    let dns = changing_dns();
    let config = config_text(&directory.path().join("data"), 0);
    let config = format!("{config}dns_servers = [\"{dns}\"]\n");
    let gateway = Gateway::start(&Config::parse(&config, |_| None).unwrap()).unwrap();
    let control = gateway.control();
    setup::service(control, "demo", "echo");
    let new = NewDomain {
        name: DOMAIN.to_owned(),
        managed_by: None,
    };
    let (added, _) = domain::add(control, &Actor::Admin, "demo", "echo", &new).unwrap();
    assert_eq!(added.status, DomainState::Pending);

    let before = newest_entry(control);
    let findings: BTreeSet<_> = (0..LOOKS)
        .map(|_| {
            domain::check(control, &Actor::Gateway, "demo", DOMAIN).unwrap();
            domain::show(control, "demo", DOMAIN).unwrap().finding
        })
        .collect();
    assert_eq!(newest_entry(control), before);
    // The latest one is shown all the same.
    assert!(findings.len() > LOOKS / 2, "{findings:?}");

    // The look of an administrator is a change.
    domain::check(control, &Actor::Admin, "demo", DOMAIN).unwrap();
    assert_eq!(newest_entry(control), before + 1);
}
