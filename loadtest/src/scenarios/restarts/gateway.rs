//! The gateway alone is stopped and started.

use std::path::Path;
use std::time::Duration;

use super::installation::Installation;
use super::{others, refused_for, report};
use crate::callers::Callers;
use crate::failure::{Failure, ensure};
use crate::report::{millis, say};

const RATE: u32 = 300;
/// Enough for the rate while requests wait for a second.
const CALLERS: u32 = 300;
/// Load before and after a restart.
const AROUND: Duration = Duration::from_secs(4);
const REFUSED_MAX: Duration = Duration::from_millis(500);

pub(super) fn run(gateway: &Path, restarts: usize) -> Result<(), Failure> {
    let mut installation = Installation::start(gateway)?;
    installation.enroll(1, "")?;
    let agent = installation.start_agent(0)?;
    for _ in 0..restarts {
        installation.wait_for_tunnels(1)?;
        let callers = Callers::start(&installation.target, CALLERS, RATE);
        std::thread::sleep(AROUND);
        let took = installation.restart_gateway()?;
        std::thread::sleep(AROUND);
        let outcome = callers.stop()?;
        report("gateway restarted", &outcome);
        let refused = refused_for(&outcome);
        say(format_args!(
            "restarts: refused for {:.0} ms; stop and start {:.0} ms",
            millis(refused),
            millis(took)
        ));
        ensure(others(&outcome).next().is_none(), || {
            "requests failed that were not refused".to_owned()
        })?;
        ensure(refused <= REFUSED_MAX, || {
            format!("requests were refused for more than {REFUSED_MAX:?}")
        })?;
    }
    installation.stop(vec![agent])
}
