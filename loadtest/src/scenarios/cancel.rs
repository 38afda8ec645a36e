//! Callers that disconnect during a download release their slots; slots are neither lost nor
//! exceeded.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::client::{Answer, Connection, Target};
use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::load;
use crate::metrics;
use crate::report::say;

const ONE_AFTER_ANOTHER: usize = 1000;
const AT_ONCE: usize = 200;
const DOWNLOAD: &str = "/bytes/100000000";
const READ_FIRST: usize = 64 * 1024;

/// The agent's default, which the demo uses.
const SLOTS: usize = 128;
const SLOW: &str = "/slow?ms=2000";
const LIMIT_CODE: &str = "GW_AGENT_CONCURRENCY_LIMIT";
/// Time within which everything must be released.
const IDLE_WITHIN: Duration = Duration::from_secs(10);

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    let demo = Demo::start(gateway, &Options::default())?;
    cancel_one_after_another(&demo.target)?;
    cancel_at_once(&demo.target)?;
    let gone = metrics::read(&demo.admin_url, "gw_requests_caller_gone_total")?;
    say(format_args!(
        "cancel: the gateway counts {gone} disconnected callers"
    ));
    wait_until_idle(&demo)?;

    let answers = slow_at_once(&demo.target, SLOTS)?;
    let succeeded = answers
        .iter()
        .filter(|answer| answer.head.status == 200)
        .count();
    say(format_args!(
        "cancel: {succeeded} of {SLOTS} requests at once answered 200"
    ));
    ensure(succeeded == SLOTS, || {
        format!("slots were lost: {} requests failed", SLOTS - succeeded)
    })?;
    wait_until_idle(&demo)?;

    overload(&demo.target)?;
    wait_until_idle(&demo)?;
    demo.stop()
}

fn cancel_one_after_another(target: &Target) -> Result<(), Failure> {
    let start = Instant::now();
    for _ in 0..ONE_AFTER_ANOTHER {
        let connection = begin_download(target.connect()?)?;
        ensure(connection.is_some(), || {
            format!("{LIMIT_CODE}: cancelled downloads kept their slots")
        })?;
    }
    let seconds = start.elapsed().as_secs_f64();
    say(format_args!(
        "cancel: {ONE_AFTER_ANOTHER} downloads cancelled one after another after 64 KiB, in \
         {seconds:.1} s"
    ));
    Ok(())
}

fn cancel_at_once(target: &Target) -> Result<(), Failure> {
    let downloads = load::at_once(load::connect(target, AT_ONCE)?, begin_download)?;
    let running = downloads.iter().flatten().count();
    drop(downloads);
    say(format_args!(
        "cancel: of {AT_ONCE} downloads at once {running} ran and were cancelled together, {} \
         exceeded the slots",
        AT_ONCE - running
    ));
    Ok(())
}

/// Starts a download; `None` if the agent had no free slot.
fn begin_download(mut connection: Connection) -> Result<Option<Connection>, Failure> {
    let head = connection.get(DOWNLOAD)?;
    if head.status == 502 && head.field("x-gw-status") == Some("AgentError") {
        return Ok(None);
    }
    ensure(head.status == 200, || {
        format!("{DOWNLOAD}: status {}", head.status)
    })?;
    connection.read_body_exact(&mut vec![0; READ_FIRST])?;
    Ok(Some(connection))
}

fn wait_until_idle(demo: &Demo) -> Result<(), Failure> {
    let took = metrics::wait_until_idle(&demo.admin_url, IDLE_WITHIN)?;
    say(format_args!(
        "cancel: no slot in use and nothing in flight after {:.1} s",
        took.as_secs_f64()
    ));
    Ok(())
}

/// Sends more concurrent requests than slots. The excess must be refused with the concurrency
/// limit's code.
fn overload(target: &Target) -> Result<(), Failure> {
    let answers = slow_at_once(target, AT_ONCE)?;
    let succeeded = answers
        .iter()
        .filter(|answer| answer.head.status == 200)
        .count();
    let refused = answers
        .iter()
        .filter(|answer| {
            answer.head.status == 502 && answer.error_code().as_deref() == Some(LIMIT_CODE)
        })
        .count();
    say(format_args!(
        "cancel: of {AT_ONCE} requests at once {succeeded} answered 200, {refused} 502 {LIMIT_CODE}"
    ));
    let other = AT_ONCE - succeeded - refused;
    ensure(succeeded == SLOTS && other == 0, || {
        format!(
            "expected {SLOTS} times 200 and the rest refused; {succeeded} succeeded, {other} ended \
             otherwise"
        )
    })
}

fn slow_at_once(target: &Target, count: usize) -> Result<Vec<Answer>, Failure> {
    load::at_once(load::connect(target, count)?, |mut connection| {
        connection.ask(SLOW)
    })
}
