//! The only agent of a service is restarted as its unit of systemd does: the worker serves until
//! the next one has its tunnels.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use super::installation::Installation;
use super::report;
use crate::callers::{CALLERS, Callers};
use crate::failure::{Failure, ensure};

const RATE: u32 = 300;
/// Load before and after a restart.
const AROUND: Duration = Duration::from_secs(2);

pub(super) fn run(gateway: &Path, restarts: usize) -> Result<(), Failure> {
    let installation = Installation::start(gateway)?;
    installation.enroll(1, "")?;
    let mut agent = installation.start_agent(0)?;
    installation.wait_for_tunnels(1)?;
    let callers = Callers::start(&installation.target, CALLERS, RATE);
    for _ in 0..restarts {
        std::thread::sleep(AROUND);
        agent.stop_with(Signal::USR1)?;
        agent = installation.start_agent(0)?;
    }
    std::thread::sleep(AROUND);
    let outcome = callers.stop()?;
    report(&format!("lone agent restarted {restarts} times"), &outcome);
    ensure(outcome.failed.is_empty(), || "requests failed".to_owned())?;
    installation.stop(vec![agent])
}
