//! Memory of callers that are connected and idle after one request.

use std::io::Write;
use std::time::Duration;

use super::figures::{Case, Column, Row, Sample, Work};
use super::load::Generator;
use super::setups::{Entrant, Kind, Setup};
use super::{Bench, take_turns};
use crate::client::{Connection, Stream, Target};
use crate::failure::{Failure, ensure};
use crate::http2;

const HTTP2: [Kind; 3] = [Kind::Gw, Kind::Haproxy, Kind::Nginx];
/// Callers. The front of HAProxy accepts at most 4,000.
const CALLERS: usize = 2000;
/// Time after which buffers of the last requests are released.
const SETTLES: Duration = Duration::from_secs(2);

pub(super) fn run(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    Ok(vec![
        case(bench, "HTTP/1.1 caller", &Kind::HTTP1, connect_http1)?,
        case(bench, "HTTP/2 caller", &HTTP2, connect_http2)?,
    ])
}

fn case<T>(
    bench: &Bench<'_>,
    name: &str,
    kinds: &[Kind],
    connect: fn(&Target) -> Result<T, Failure>,
) -> Result<Case, Failure> {
    let entrants = bench.entrants(kinds);
    let rounds = take_turns(bench.options.rounds, &entrants, |entrant| {
        measure(bench, *entrant, connect)
    })?;
    let rows = entrants
        .iter()
        .zip(rounds)
        .map(|(entrant, rounds)| Row {
            setup: bench.name_of(*entrant),
            rounds,
        })
        .collect();
    Ok(Case::new("idle", name, Work::Idle, Column::Bytes).with_rows(rows))
}

/// Measures a new setup, because allocators keep the memory of earlier connections.
fn measure<T>(
    bench: &Bench<'_>,
    entrant: Entrant,
    connect: fn(&Target) -> Result<T, Failure>,
) -> Result<Sample, Failure> {
    let setup = Setup::start(bench, entrant, bench.site.backend_port())?;
    Generator::http1()?.warm_up(&setup)?;
    std::thread::sleep(SETTLES);
    let before = setup.memory()?;
    let callers: Vec<T> = (0..CALLERS)
        .map(|_| connect(&setup.target))
        .collect::<Result<_, _>>()?;
    std::thread::sleep(SETTLES);
    let more = setup.memory()?.saturating_sub(before);
    drop(callers);
    Ok(Sample::default().with(Column::Bytes, more as f64 / CALLERS as f64))
}

fn connect_http1(target: &Target) -> Result<Connection, Failure> {
    let mut connection = target.connect()?;
    let answer = connection.ask("/")?;
    ensure(answer.head.status == 200, || {
        format!("status {}", answer.head.status)
    })?;
    Ok(connection)
}

/// Opens an HTTP/2 connection and completes one request on it.
fn connect_http2(target: &Target) -> Result<Stream, Failure> {
    const STREAM: u32 = 1;
    let mut stream = http2::begin(target.open(&[b"h2"])?, &[])?;
    let block = http2::request("GET", &target.host, "/", Some(&target.service_key));
    stream.write_all(&http2::headers(STREAM, http2::END_STREAM, &block))?;
    loop {
        let frame = http2::read(&mut stream)?;
        if frame.kind == http2::SETTINGS && frame.flags & http2::ACK == 0 {
            stream.write_all(&http2::frame(http2::SETTINGS, http2::ACK, 0, &[]))?;
        }
        ensure(
            frame.kind != http2::GOAWAY && frame.kind != http2::RST_STREAM,
            || "the request was refused".to_owned(),
        )?;
        let is_response =
            matches!(frame.kind, http2::HEADERS | http2::DATA) && frame.stream == STREAM;
        if is_response && frame.flags & http2::END_STREAM != 0 {
            return Ok(stream);
        }
    }
}
