//! `gw-gateway healthy`: whether a running gateway takes requests.

use std::io::{self, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Args;
use gw_control_plane::admin_client::{AdminAddress, is_of_tls_listener};
use gw_shared::command::Failure;
use gw_shared::text::escaped;
use http::StatusCode;

use super::ListenerOptions;

/// Longest wait for one answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes of an answer that are read. The longest is one sentence.
const ANSWER_MAX: u64 = 4096;

#[derive(Args)]
pub(crate) struct HealthyArguments {
    /// Ask again until the gateway is ready, at most for this time: 30s, 2m. A missing
    /// configuration file is waited for, too.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
    #[command(flatten)]
    listener: ListenerOptions,
}

impl HealthyArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let within = self.wait.unwrap_or_default();
        let deadline = Deadline::after(within);
        let address = loop {
            match self.address() {
                Err(_) if self.awaits_config() && !deadline.is_over() => sleep(POLL_INTERVAL),
                address => break address?,
            }
        };
        wait_until(&address, &deadline).map_err(Failure::Run)?;
        let said = writeln!(io::stdout(), "{}: ready", address.url);
        said.map_err(|error| Failure::Run(format!("standard output: {error}")))
    }

    fn address(&self) -> Result<AdminAddress, Failure> {
        let environment = |name: &str| std::env::var(name).ok();
        let config = self.listener.load_config(environment)?;
        self.listener.address(config.as_ref(), environment)
    }

    /// Whether the configuration file is not there yet: `init` in another process writes it.
    fn awaits_config(&self) -> bool {
        self.listener
            .config
            .as_ref()
            .is_some_and(|path| !path.exists())
    }
}

/// End of a wait. The first attempt is made in any case.
struct Deadline {
    /// `None` beyond what the clock can hold.
    at: Option<Instant>,
    within: Duration,
}

impl Deadline {
    fn after(within: Duration) -> Self {
        Self {
            at: Instant::now().checked_add(within),
            within,
        }
    }

    fn is_over(&self) -> bool {
        self.at.is_some_and(|at| Instant::now() >= at)
    }
}

/// Waits until the gateway at `address` is ready; the reason if it is not after `within`.
pub(crate) fn wait(address: &AdminAddress, within: Duration) -> Result<(), String> {
    wait_until(address, &Deadline::after(within))
}

fn wait_until(address: &AdminAddress, deadline: &Deadline) -> Result<(), String> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(ANSWER_WITHIN))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false);
    let client = address.agent(config);
    loop {
        let Err(reason) = ask(&client, address) else {
            return Ok(());
        };
        if deadline.is_over() {
            return Err(if deadline.within.is_zero() {
                reason
            } else {
                format!("{reason} (after {:?})", deadline.within)
            });
        }
        sleep(POLL_INTERVAL);
    }
}

/// Asks once; the reason if the gateway does not take requests.
fn ask(client: &ureq::Agent, address: &AdminAddress) -> Result<(), String> {
    let url = &address.url;
    let mut answer = client
        .get(format!("{url}/readyz"))
        .call()
        .map_err(|error| no_answer(address, &error))?;
    let status = answer.status();
    let body = answer
        .body_mut()
        .with_config()
        .limit(ANSWER_MAX)
        .read_to_vec()
        .map_err(|error| no_answer(address, &error))?;
    match status {
        StatusCode::OK => Ok(()),
        StatusCode::SERVICE_UNAVAILABLE => Err(format!(
            "{url}: not ready: {}",
            escaped(String::from_utf8_lossy(&body).trim())
        )),
        StatusCode::BAD_REQUEST if is_of_tls_listener(&body) => Err(format!(
            "{url} speaks https, not plain HTTP: use https:// in the URL (--admin-url)"
        )),
        _ => Err(format!(
            "{url} is not the admin listener of a gateway: it answers /readyz with {status}; name \
             the listener with --admin-url or --config"
        )),
    }
}

fn no_answer(address: &AdminAddress, error: &ureq::Error) -> String {
    let url = &address.url;
    match error {
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => format!(
            "{url}: connection refused: no gateway listens there; start it, or name its admin \
             listener with --admin-url or --config"
        ),
        error => address.explain(error).unwrap_or_else(|| {
            format!(
                "{url}: no answer: {error}; check the URL (--admin-url or --config), and the log \
                 of the gateway"
            )
        }),
    }
}
