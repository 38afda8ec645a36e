//! Findings about domains that DNS does not prove.

use std::collections::BTreeSet;

use gw_control_plane::control::changes::audit;
use gw_control_plane::control::records::domain;
use gw_control_plane::control::{Actor, Control, NewDomain};
use gw_gateway::Gateway;
use gw_interface::config::Config;
use gw_store::{AuditQuery, DomainState};

use super::DOMAIN;
use crate::support::peers::changing_dns;
use crate::support::processes::process::config_text;
use crate::support::setup;

/// Looks of the gateway at DNS.
const LOOKS: usize = 30;

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
    let dns = changing_dns::start();
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
