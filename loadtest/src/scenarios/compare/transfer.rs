//! CPU time and speed of large bodies in both directions.

use std::io::{self, BufReader, Read};
use std::time::Instant;

use super::Bench;
use super::figures::{Case, Column, Sample, Work};
use super::peers::{ANSWER, LARGE};
use super::setups::{Kind, Setup};
use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::sink;

const BUFFER: usize = 64 * 1024;

pub(super) fn run(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let bytes = bench.options.megabytes * 1_000_000;
    let case = |name: &str| Case::new("bulk", name, Work::Gigabyte, Column::Cpu);
    let downloads = bench.compare(&bench.start_all(&Kind::HTTP1)?, case("download"), |setup| {
        transfer(setup, bytes, download)
    })?;
    // nginx would answer before the end of an upload.
    let backend = sink::listen("upload", |request, length, socket| {
        io::copy(&mut request.take(length), &mut io::sink())?;
        sink::respond(socket, ANSWER)
    })?;
    let setups = bench.start_all_before(&Kind::HTTP1, backend.port())?;
    let uploads = bench.compare(&setups, case("upload"), |setup| {
        transfer(setup, bytes, upload)
    })?;
    Ok(vec![downloads, uploads])
}

fn transfer(
    setup: &Setup,
    bytes: u64,
    transfer: fn(&Target, u64) -> Result<(), Failure>,
) -> Result<Sample, Failure> {
    let start = Instant::now();
    let ((), cpu) = setup.spend(|target| transfer(target, bytes))?;
    let seconds = start.elapsed().as_secs_f64();
    let sample = Sample::default().with_cpu(cpu, Work::Gigabyte, bytes as f64 / 1e9);
    Ok(sample.with(Column::Rate, bytes as f64 / 1e6 / seconds))
}

/// Downloads the large file until `bytes` have arrived, on one connection.
fn download(target: &Target, bytes: u64) -> Result<(), Failure> {
    let mut connection = target.connect()?;
    let mut buffer = vec![0; BUFFER];
    let mut received = 0;
    while received < bytes {
        let head = connection.get(LARGE)?;
        ensure(head.status == 200, || {
            format!("{LARGE}: status {}", head.status)
        })?;
        loop {
            let read = connection.read_body(&mut buffer)?;
            if read == 0 {
                break;
            }
            received += read as u64;
        }
    }
    Ok(())
}

fn upload(target: &Target, bytes: u64) -> Result<(), Failure> {
    let mut body = BufReader::with_capacity(BUFFER, io::repeat(b'x').take(bytes));
    let answer = target.connect()?.upload("/upload", bytes, &mut body)?;
    ensure(answer.head.status == 200, || {
        format!("upload: status {}", answer.head.status)
    })
}
