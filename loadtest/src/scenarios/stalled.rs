//! Callers that stop reading large downloads do not slow down others.

use std::path::Path;
use std::time::Duration;

use crate::client::{Connection, Target};
use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::load;
use crate::report::{millis, percentile, say};

const STALLED: usize = 8;
const DOWNLOAD: &str = "/bytes/1000000000";
/// Bytes of each download that its caller reads first.
const READ_FIRST: usize = 64 * 1024;
/// Socket buffers take the first megabytes at full speed, so a download stalls only after this
/// time.
const STALLS_AFTER: Duration = Duration::from_secs(1);
/// Bytes of each download read afterwards, which show that it was stalled and not broken.
const READ_LATER: usize = 4 * 1024 * 1024;

const CALLERS: usize = 16;
const REQUESTS: usize = 1000;
const SMALL: &str = "/hello";

/// Noise only increases latencies, so both sides use the best of several attempts.
const ATTEMPTS: usize = 3;
/// Largest allowed ratio of the p99 with stalled callers to the p99 without.
const SLOWER_MAX: u32 = 2;

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    let demo = Demo::start(gateway, &Options::default())?;
    // Warm-up: fills pools and pages in code.
    Latency::measure(&demo.target)?;
    let mut unloaded_best = Duration::MAX;
    let mut loaded_best = Duration::MAX;
    for attempt in 1..=ATTEMPTS {
        let (unloaded, loaded) = self::attempt(&demo.target)?;
        say(format_args!(
            "attempt {attempt}: unloaded p50 {:.2} ms, p99 {:.2} ms; \
             with {STALLED} stalled downloads p50 {:.2} ms, p99 {:.2} ms",
            millis(unloaded.p50),
            millis(unloaded.p99),
            millis(loaded.p50),
            millis(loaded.p99),
        ));
        unloaded_best = unloaded_best.min(unloaded.p99);
        loaded_best = loaded_best.min(loaded.p99);
    }
    say(format_args!(
        "stalled: all answered; best p99 {:.2} ms unloaded, {:.2} ms with stalled downloads",
        millis(unloaded_best),
        millis(loaded_best)
    ));
    ensure(loaded_best <= unloaded_best * SLOWER_MAX, || {
        format!("p99 beside stalled callers is more than {SLOWER_MAX} times the p99 without")
    })?;
    demo.stop()
}

/// Measures latencies without and with stalled downloads.
fn attempt(target: &Target) -> Result<(Latency, Latency), Failure> {
    let unloaded = Latency::measure(target)?;
    let mut stalled = (0..STALLED)
        .map(|_| stalled_download(target))
        .collect::<Result<Vec<_>, _>>()?;
    std::thread::sleep(STALLS_AFTER);
    let loaded = Latency::measure(target)?;
    let mut later = vec![0; READ_LATER];
    for (number, download) in stalled.iter_mut().enumerate() {
        download.read_body_exact(&mut later)?;
        let as_sent = (READ_FIRST..)
            .zip(&later)
            .all(|(position, byte)| *byte == position as u8);
        ensure(as_sent, || {
            format!("stalled download {number} goes on with wrong bytes")
        })?;
    }
    Ok((unloaded, loaded))
}

fn stalled_download(target: &Target) -> Result<Connection, Failure> {
    let mut connection = target.connect()?;
    let head = connection.get(DOWNLOAD)?;
    ensure(head.status == 200, || {
        format!("{DOWNLOAD}: status {}", head.status)
    })?;
    connection.read_body_exact(&mut vec![0; READ_FIRST])?;
    Ok(connection)
}

struct Latency {
    p50: Duration,
    p99: Duration,
}

impl Latency {
    /// Measures small requests, each of which must succeed.
    fn measure(target: &Target) -> Result<Self, Failure> {
        let run = load::requests(target, CALLERS, REQUESTS, SMALL)?;
        let latencies = run.latencies("small requests")?;
        Ok(Self {
            p50: percentile(&latencies, 50),
            p99: percentile(&latencies, 99),
        })
    }
}
