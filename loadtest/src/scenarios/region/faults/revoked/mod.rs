//! Revocations of keys during faults: a node that a reply did not name never accepts the key
//! afterwards.

mod kinds;
mod trial;

use std::path::Path;

pub(in crate::scenarios::region) use self::kinds::Kind;
use self::trial::Trial;
use super::FaultOptions;
use super::site::{Plan, Site};
use super::table::{Row, Table};
use crate::failure::{Failure, ensure};
use crate::scenarios::region::nodes::NODES;

/// Services of each agent: enough for each node to own one whose agent connects to it.
const SERVICES: usize = 12;

pub(super) fn run(
    gateway: &Path,
    options: &FaultOptions,
    revocations: usize,
    table: &mut Table,
) -> Result<(), Failure> {
    let start = || {
        Site::start(
            gateway,
            &Plan {
                services: SERVICES,
                has_standby: true,
                ..Plan::default()
            },
        )
    };
    let mut site = None;
    let kinds = options.kinds();
    let each = revocations.div_ceil(kinds.len());
    for kind in kinds {
        let mut region = match site.take() {
            Some(region) => region,
            None => start()?,
        };
        // The faults of the kind before have an end.
        region.wait_until_well()?;
        let row = one(&mut region, kind, each);
        table.add_or_failed(&name(kind), row);
        // The standby is used up by a failover.
        site = Some(region).filter(|_| !kind.is_failover());
    }
    Ok(())
}

fn one(site: &mut Site, kind: Kind, each: usize) -> Result<Row, Failure> {
    let local = local_services(site)?;
    let mut trial = Trial::new(site, local, each)?;
    kind.run(&mut trial)?;
    let row = trial.row(name(kind))?;
    if !kind.is_failover() {
        return Ok(row);
    }
    // A new primary that lacks a change of the members is a reason to restart all nodes: see
    // docs/region-operation.md.
    let well = site.wait_until_well();
    Ok(row.note(well.map_or_else(
        |failure| format!("the region is not well afterwards: {failure}"),
        |()| "all nodes are members afterwards".to_owned(),
    )))
}

fn name(kind: Kind) -> String {
    format!("revoked: {kind:?}")
}

/// A service of each node, whose agent connects to the node: it serves them when it reaches no
/// other machine.
fn local_services(site: &Site) -> Result<[usize; NODES], Failure> {
    let owners = site.owners()?;
    let mut local = [0; NODES];
    for (node, local) in local.iter_mut().enumerate() {
        let is_local =
            |it: &usize| owners[*it] == Some(node) && site.services[*it].entry == Some(node);
        let found = (0..owners.len()).find(is_local);
        ensure(found.is_some(), || {
            format!("node {node} owns no service of its agent")
        })?;
        *local = found.unwrap_or_default();
    }
    Ok(local)
}
