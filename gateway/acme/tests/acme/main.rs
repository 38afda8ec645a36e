//! Orders at Pebble, with proofs in BIND, by a hook and in a TLS handshake.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests stop at the first surprise"
)]

mod authority;
mod hook;
mod orders;
mod ownership;
mod renewal_info;
mod tls_alpn;
mod updates;

#[path = "../../../../shared/tests/programs/mod.rs"]
mod programs;
#[path = "../servers/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod servers;

use std::sync::Arc;
use std::time::Duration;

use gw_acme::{AcmeError, Orders, Progress, Publisher, Rfc2136, Rfc2136Settings, Settings, State};
use gw_base::clock::Timestamp;
use gw_shared::net::tls::Trusted;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use self::servers::named::{KEY_NAME, Named};
use self::servers::pebble::{Options, Pebble};

/// Programs that the tests start.
const PROGRAMS: [&str; 3] = ["pebble", "named", "curl"];
const NAMES: [&str; 2] = ["eu1.example.test", "*.eu1.example.test"];
/// Steps of an order that takes long. Ends a failing test only.
const STEPS_MAX: usize = 200;

/// Runs a test that waits.
fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(test)
}

fn settings(pebble: &Pebble) -> Settings {
    let root = CertificateDer::from_pem_file(pebble.ca_file()).unwrap();
    Settings {
        directory: pebble.directory(),
        contacts: vec!["admin@example.test".into()],
        terms_accepted: true,
        external_account: None,
        authorities: Some(Arc::new(Trusted::only(vec![root]).unwrap())),
        names: NAMES.map(str::to_owned).to_vec(),
    }
}

fn updates(named: &Named) -> Rfc2136Settings {
    Rfc2136Settings {
        server: named.address,
        key_name: KEY_NAME.into(),
        key_file: named.key_file(),
        zone: None,
        dns_servers: vec![named.address],
    }
}

/// BIND, Pebble that asks it, and orders with its updates.
fn everything(options: impl FnOnce(Options) -> Options) -> (Named, Pebble, Orders) {
    let named = Named::start("eu1 A 127.0.0.1");
    let pebble = Pebble::start(options(Options::new(named.address)));
    let publisher: Arc<dyn Publisher> = Arc::new(Rfc2136::new(updates(&named)));
    let orders = Orders::new(settings(&pebble), publisher);
    (named, pebble, orders)
}

/// Makes steps until the order is issued, given up or fails.
async fn issue(orders: &Orders, state: &mut State) -> Result<(), AcmeError> {
    for _ in 0..STEPS_MAX {
        match orders.advance(state, Timestamp::now()).await? {
            Progress::Changed => {}
            Progress::Wait(time) => tokio::time::sleep(time.min(Duration::from_secs(1))).await,
            Progress::Issued => return Ok(()),
            Progress::GivenUp(error) => return Err(error),
        }
    }
    panic!("no end after {STEPS_MAX} steps: {state:?}");
}
