//! The clock of a node is wrong, at its start and while it runs. `libfaketime` changes it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::FaultOptions;
use super::site::{Plan, Site};
use super::table::{Row, Table};
use super::watch::{self, Watch};
use super::world::Machine;
use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::scenarios::region::nodes::NODES;

const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";
/// Seconds that the clock is ahead.
const OFFSETS: [i64; 4] = [3600, -3600, 86_400, -86_400];
const SERVICES: usize = 4;
const RATE: u32 = 60;
const CALLERS: u32 = 8;
/// The node with the wrong clock.
const WRONG: usize = NODES - 1;
/// The library reads its file again after a second.
const NOTICED: Duration = Duration::from_secs(2);
const JOINED_WITHIN: Duration = Duration::from_secs(20);
const WELL_WITHIN: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(200);

/// The file that has the offset of a clock.
struct Clock(PathBuf);

/// Beginning of the line that a node logs whose clock is too far off to join.
const DOES_NOT_JOIN: &str = "this node does not join the region: ";

/// What a node with a wrong clock does at its start.
#[derive(Debug, PartialEq, Eq)]
enum Start {
    /// It has ended, or does not join and says that a clock is wrong.
    Refused,
    Live,
    Neither,
}

pub(super) fn run(
    gateway: &Path,
    options: &FaultOptions,
    table: &mut Table,
) -> Result<(), Failure> {
    ensure(Path::new(LIBRARY).is_file(), || {
        "libfaketime is not installed: apt-get install faketime".to_owned()
    })?;
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    let clock = Clock(folder.path().join("offset"));
    clock.set(0)?;
    let environment = vec![
        ("LD_PRELOAD", LIBRARY.to_owned()),
        ("FAKETIME_TIMESTAMP_FILE", clock.0.display().to_string()),
        ("FAKETIME_CACHE_DURATION", "1".to_owned()),
        // Only the time of day is wrong.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    let mut site = Site::start(
        gateway,
        &Plan {
            services: SERVICES,
            environment,
            ..Plan::default()
        },
    )?;
    let length = Duration::from_secs(options.clock_seconds);
    for offset in OFFSETS {
        let row = running(&site, &clock, offset, length);
        table.add_or_failed(&format!("clock {} while running", hours(offset)), row);
        clock.set(0)?;
        site.wait_until_well()?;
    }
    for offset in OFFSETS {
        let row = at_start(&mut site, &clock, offset, length);
        table.add_or_failed(&format!("clock {} at start", hours(offset)), row);
        // The next trial begins with a node that has never seen a wrong clock.
        clock.set(0)?;
        site.kill_node(WRONG)?;
        site.start_node(WRONG)?;
        // Its own agents are not used, and may wait for more than a minute until they connect
        // again.
        site.wait_for_members(0..NODES)?;
    }
    Ok(())
}

/// Requests with keys and with tokens of both sides of the clock go on.
fn running(site: &Site, clock: &Clock, offset: i64, length: Duration) -> Result<Row, Failure> {
    let services: Vec<usize> = (0..site.services.len()).collect();
    let form = site.token_form(0)?;
    let tokens = [site.token(0, &form)?, site.token(WRONG, &form)?];
    let keys = Watch::start(
        site,
        &watch::pairs(&[0, 1, WRONG], &services),
        RATE,
        CALLERS,
    )?;
    clock.set(offset)?;
    std::thread::sleep(NOTICED);
    let minted = site.token(WRONG, &form);
    let here = Watch::with(
        site,
        &watch::pairs(&[WRONG], &[0]),
        RATE,
        CALLERS,
        with(&tokens[0]),
    )?;
    let there = Watch::with(
        site,
        &watch::pairs(&[0], &[0]),
        RATE,
        CALLERS,
        with(&tokens[1]),
    )?;
    let fresh = minted.as_ref().ok().map(|token| {
        Watch::with(
            site,
            &watch::pairs(&[0, WRONG], &[0]),
            RATE,
            CALLERS,
            with(token),
        )
    });
    std::thread::sleep(length);
    clock.set(0)?;
    std::thread::sleep(NOTICED);
    let fresh = fresh.transpose()?.map_or(Ok(Vec::new()), Watch::stop)?;
    let mut row = Row::new(format!("clock {} while running", hours(offset)));
    for (name, seen) in [
        ("with keys", keys.stop()?),
        ("with an earlier token at the node", here.stop()?),
        ("with its earlier token elsewhere", there.stop()?),
        ("with its token of that time", fresh),
    ] {
        let failed = watch::failures(&seen).count();
        let kinds = watch::kinds(watch::failures(&seen).map(|(_, failed)| failed));
        row = row.check(
            failed == 0,
            format!(
                "{failed} of {} {name} failed ({kinds})",
                watch::requests(&seen)
            ),
        );
    }
    let figure = minted.map_or_else(
        |failure| (false, failure.to_string()),
        |_| (true, "it issued a token".to_owned()),
    );
    Ok(row.check(figure.0, figure.1).note(well_again(site)?))
}

fn at_start(site: &mut Site, clock: &Clock, offset: i64, length: Duration) -> Result<Row, Failure> {
    site.stop_node(WRONG)?;
    site.wait_for_members(0..WRONG)?;
    // Agents of the other nodes.
    let services: Vec<usize> = (0..site.services.len())
        .filter(|it| site.services[*it].entry != Some(WRONG))
        .collect();
    let others = Watch::start(site, &watch::pairs(&[0, 1], &services), RATE, CALLERS)?;
    clock.set(offset)?;
    let refusals = site.log(WRONG)?.matches(DOES_NOT_JOIN).count();
    site.start_node(WRONG)?;
    let start = started(site, refusals)?;
    let here = (start == Start::Live)
        .then(|| Watch::start(site, &watch::pairs(&[WRONG], &services), RATE, CALLERS));
    std::thread::sleep(length);
    let here = here.transpose()?.map_or(Ok(Vec::new()), Watch::stop)?;
    let others = others.stop()?;
    clock.set(0)?;
    std::thread::sleep(NOTICED);
    if site.has_ended(WRONG)? {
        site.start_node(WRONG)?;
    }
    let mut row = Row::new(format!("clock {} at start", hours(offset)))
        .check(start != Start::Neither, format!("the start: {start:?}"));
    for (name, seen) in [("at the other nodes", others), ("at the node", here)] {
        let failed = watch::failures(&seen).count();
        let kinds = watch::kinds(watch::failures(&seen).map(|(_, failed)| failed));
        row = row.check(
            failed == 0,
            format!(
                "{failed} of {} {name} failed ({kinds})",
                watch::requests(&seen)
            ),
        );
    }
    Ok(match well_again(site) {
        Ok(figure) => row.note(figure),
        Err(failure) => row.check(false, failure.to_string()),
    })
}

/// Waits until the node has ended, is live or says that it does not join. `refusals` is how often
/// it has said so before.
fn started(site: &mut Site, refusals: usize) -> Result<Start, Failure> {
    let deadline = Instant::now() + JOINED_WITHIN;
    while Instant::now() < deadline {
        if site.has_ended(WRONG)? || site.log(WRONG)?.matches(DOES_NOT_JOIN).count() > refusals {
            return Ok(Start::Refused);
        }
        let status = site.status(WRONG);
        if status["standing"] == "member" && status["moving"] == false {
            return Ok(Start::Live);
        }
        std::thread::sleep(TICK);
    }
    Ok(Start::Neither)
}

/// Waits until requests at the node are served, for services of each node.
fn well_again(site: &Site) -> Result<String, Failure> {
    let began = Instant::now();
    // Agents of the node itself may wait longer until they connect again.
    for service in (0..site.services.len()).filter(|it| site.services[*it].entry != Some(WRONG)) {
        let target = site.target(service)?;
        for node in [WRONG, 0] {
            loop {
                let asked = site
                    .world
                    .on(Machine::Node(node), || target.connect()?.ask("/hello"));
                let Err(finding) = asked.map(|answer| answer.head.status).and_then(is_served)
                else {
                    break;
                };
                ensure(began.elapsed() < WELL_WITHIN, || {
                    format!(
                        "not well {} s after the clock is right: {finding}",
                        WELL_WITHIN.as_secs()
                    )
                })?;
                std::thread::sleep(TICK);
            }
        }
    }
    Ok(format!(
        "well {:.1} s after the clock is right",
        (NOTICED + began.elapsed()).as_secs_f64()
    ))
}

fn is_served(status: u16) -> Result<(), Failure> {
    ensure(status == 200, || format!("a request got {status}"))
}

fn with(token: &str) -> impl Fn(Target) -> Result<Target, Failure> {
    let token = token.to_owned();
    move |target| Ok(target.with_token(token.clone()))
}

fn hours(seconds: i64) -> String {
    format!("{:+} h", seconds / 3600)
}

impl Clock {
    fn set(&self, offset: i64) -> Result<(), Failure> {
        // A rename, so that no half of a file is read.
        let next = self.0.with_extension("next");
        fs::write(&next, format!("{offset:+}\n"))?;
        Ok(fs::rename(next, &self.0)?)
    }
}
