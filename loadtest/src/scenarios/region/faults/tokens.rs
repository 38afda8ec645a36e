//! The token endpoint of a node that is cut off.

use std::path::Path;
use std::time::{Duration, Instant};

use super::site::{Plan, Site};
use super::table::{Row, Table};
use super::world::Machine;
use crate::failure::Failure;
use crate::report::millis;
use crate::scenarios::region::nodes::NODES;

const TOKENS: usize = 40;
const EVERY: Duration = Duration::from_millis(200);
/// The node that counts an address is asked for half a second at most.
const ISSUED_WITHIN: Duration = Duration::from_secs(1);

pub(super) fn run(gateway: &Path, table: &mut Table) -> Result<(), Failure> {
    let site = Site::start(
        gateway,
        &Plan {
            services: 1,
            ..Plan::default()
        },
    )?;
    let node = Machine::Node(0);
    let engine = Machine::Engine(0);
    let peers: Vec<Machine> = (1..NODES).map(Machine::Node).collect();
    for (name, machines) in [
        ("PostgreSQL", vec![engine]),
        ("the other nodes", peers.clone()),
        ("both", [peers, vec![engine]].concat()),
    ] {
        let form = site.token_form(0)?;
        machines
            .iter()
            .try_for_each(|other| site.world.cut(node, *other))?;
        let row = issued(
            &site,
            &form,
            format!("tokens of a node that is cut off from {name}"),
        );
        machines
            .iter()
            .try_for_each(|other| site.world.heal(node, *other))?;
        table.add(row);
        site.wait_until_well()?;
    }
    Ok(())
}

/// Asks the node for tokens.
fn issued(site: &Site, form: &str, situation: String) -> Row {
    let mut failures = Vec::new();
    let mut slowest = Duration::ZERO;
    for _ in 0..TOKENS {
        let asked = Instant::now();
        if let Err(failure) = site.token(0, form) {
            failures.push(failure.to_string());
        }
        slowest = slowest.max(asked.elapsed());
        std::thread::sleep(EVERY);
    }
    let first = failures
        .first()
        .map_or_else(String::new, |failure| format!(": {failure}"));
    Row::new(situation)
        .check(
            failures.is_empty(),
            format!("{} of {TOKENS} requests failed{first}", failures.len()),
        )
        .check(
            slowest <= ISSUED_WITHIN,
            format!("the slowest took {:.0} ms", millis(slowest)),
        )
}
