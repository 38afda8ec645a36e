//! Attacks beside ordinary callers, whose latency must stay within a bound.

mod attacks;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::gettid;
use serde_json::json;

use self::attacks::{ATTACKS, Attack, Attacked};
use crate::client::Target;
use crate::demo::{Demo, Options as DemoOptions, UNLIMITED};
use crate::failure::{Failure, ensure};
use crate::load::Latency;
use crate::machine::procfs;
use crate::machine::scheduling::{Class, pin_to, schedule};
use crate::metrics;
use crate::report::{millis, say};

/// Core of the gateway's worker. Callers, agent and backend share the other core, in place of
/// separate machines, because the gateway is the target of the attacks.
const GATEWAY_CORE: usize = 0;
const CALLERS_CORE: usize = 1;
/// More slots than attackers with a key can have requests in flight, because competition for slots
/// is not measured.
const SLOTS: u32 = 1024;
/// Time from the start of an attack to the measurement.
const BUILDS_UP: Duration = Duration::from_millis(500);
/// Noise only increases latencies, so both sides use the best of several attempts.
const ATTEMPTS: usize = 3;
/// Largest allowed ratio of the p99 during an attack to the p99 without.
const SLOWER_MAX: u32 = 2;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only attacks whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Length of each measurement.
    #[arg(long, default_value_t = 3)]
    seconds: u64,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let attacks: Vec<&Attack> = ATTACKS
        .iter()
        .filter(|attack| attack.name.contains(&options.only))
        .collect();
    ensure(!attacks.is_empty(), || {
        format!("no attack has a name that contains {}", options.only)
    })?;
    pin_to(None, CALLERS_CORE)?;
    let mut failed = Vec::new();
    for attack in attacks {
        // Each attack gets a new demo, so that budgets used by one do not affect the next.
        let with = DemoOptions {
            workers: 1,
            cores: vec![GATEWAY_CORE],
            slots: Some(SLOTS),
            ..Default::default()
        };
        let demo = Demo::start(gateway, &with)?;
        arrange(demo.pid())?;
        if let Err(failure) = beside(&demo, attack, Duration::from_secs(options.seconds)) {
            say(format_args!("{}: {failure}", attack.name));
            failed.push(attack.name);
        }
        demo.stop()?;
    }
    ensure(failed.is_empty(), || {
        format!("failed: {}", failed.join(", "))
    })
}

/// Measures ordinary callers during one attack.
fn beside(demo: &Demo, attack: &Attack, length: Duration) -> Result<(), Failure> {
    let target = attacked_service(demo, attack.on)?;
    // Warm-up: fills pools and pages in code.
    measure(demo, length / 3)?;
    let mut quiet = Latency::MAX;
    let mut attacked = Latency::MAX;
    let rounds = AtomicU64::new(0);
    let ended = AtomicU64::new(0);
    for _ in 0..ATTEMPTS {
        quiet = quiet.min(measure(demo, length)?);
        let stop = AtomicBool::new(false);
        let cpu = procfs::cpu(demo.pid());
        let began = Instant::now();
        let beside_it = std::thread::scope(|scope| {
            let attackers: Vec<_> = (0..attack.attackers)
                .map(|number| {
                    let stop = &stop;
                    let rounds = &rounds;
                    let ended = &ended;
                    let target = &target;
                    scope.spawn(move || {
                        schedule(gettid(), Class::Leftovers)?;
                        while !stop.load(Ordering::Relaxed) {
                            rounds.fetch_add(1, Ordering::Relaxed);
                            // A failure is the expected result: the product closed the connection.
                            if attack.run(target, number, stop).is_err() {
                                ended.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        Ok(())
                    })
                })
                .collect();
            std::thread::sleep(BUILDS_UP);
            let measured = measure(demo, length);
            stop.store(true, Ordering::Relaxed);
            let joined = attackers.into_iter().map(|attacker| {
                let joined = attacker.join();
                joined.unwrap_or_else(|_| Err(Failure::new("an attacker panicked")))
            });
            joined.collect::<Result<(), _>>().and(measured)
        })?;
        let busy = procfs::cpu(demo.pid()).saturating_sub(cpu).as_secs_f64()
            / began.elapsed().as_secs_f64();
        say(format_args!(
            "{}: p50 {:.2} ms, p99 {:.2} ms during the attack (product {:.0} % busy)",
            attack.name,
            millis(beside_it.p50),
            millis(beside_it.p99),
            busy * 100.0
        ));
        attacked = attacked.min(beside_it);
    }
    let ratio = attacked.p99_over(quiet);
    say(format_args!(
        "{}: best p99 {:.2} ms without, {:.2} ms with the attack ({ratio:.2} times); {} rounds, {} \
         closed by the product; {}",
        attack.name,
        millis(quiet.p99),
        millis(attacked.p99),
        rounds.into_inner(),
        ended.into_inner(),
        metrics::reasons(&demo.admin_url)?,
    ));
    ensure(ratio <= f64::from(SLOWER_MAX), || {
        format!("p99 during the attack is {ratio:.1} times the p99 without")
    })
}

/// The service that the attackers call, which is created if it is one of another account.
fn attacked_service(demo: &Demo, on: Attacked) -> Result<Target, Failure> {
    let limit = match on {
        Attacked::TheirService => return Ok(demo.target.clone()),
        Attacked::AnotherAccount => UNLIMITED,
        Attacked::AnotherAccountLimited => 1,
    };
    let [account, id] = ["flood", "none"];
    demo.api.create_account(account)?;
    let service = json!({ "id": id, "burst": limit, "refill_per_minute": limit });
    demo.api
        .change("POST", "/accounts/flood/services", &service)?;
    let key = demo.api.create_key(account, "flood", &[id.to_owned()])?;
    demo.target_of(account, id, &key.secret)
}

/// Latency of callers whose threads have the highest scheduling class.
fn measure(demo: &Demo, length: Duration) -> Result<Latency, Failure> {
    let callers = || {
        // The threads of the callers inherit the scheduling class.
        schedule(gettid(), Class::Callers)?;
        Latency::measure(&demo.target, length)
    };
    std::thread::scope(|scope| scope.spawn(callers).join())
        .unwrap_or_else(|_| Err(Failure::new("the callers' thread panicked")))
}

/// Pins the threads of the demo, which has agent and backend in the gateway's process, so that the
/// worker has its core alone. Sets the scheduling class of the threads on the request path.
fn arrange(process: u32) -> Result<(), Failure> {
    for (thread, name) in procfs::threads(process)? {
        let is_worker = name.starts_with("gw-worker");
        if !is_worker {
            pin_to(Some(thread), CALLERS_CORE)?;
        }
        match name.as_str() {
            "gw-echo" => schedule(thread, Class::Backend)?,
            name if is_worker || name == "gw-agent" => schedule(thread, Class::Product)?,
            // Not on the request path.
            _ => {}
        }
    }
    Ok(())
}
