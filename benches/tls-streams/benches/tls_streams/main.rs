//! Compares the product's TLS stream with the one of monoio-rustls: benches/tls-streams/README.md.
//!
//! Each server is a process of its own, which runs this program again. The client is a blocking one
//! of rustls, the same for all servers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench stops on any failure, and reports to the terminal"
)]

mod client;
mod dropped;
mod server;
mod streams;

use gw_shared::process::allocator::Allocator;
use gw_shared::runtime::{self, Driver};
use rustix::thread::CpuSet;

use self::client::{Load, Server};
use self::streams::Style;

/// The product's allocator.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Core of the server, and core of the client. On a machine with one core they are the same.
const SERVER_CORE: usize = 0;
const CLIENT_CORE: usize = 1;

const ROUNDS: usize = 9;
const LARGE: usize = 64 * 1024;
const LOADS: [Load; 4] = [
    Load::new(1, 100, 20_000),
    Load::new(16, 100, 64_000),
    Load::new(64, 100, 64_000),
    Load::new(16, LARGE, 4_000),
];

const IDLE_CONNECTIONS: usize = 2000;
/// Sizes of the message that a connection echoes before it is idle: a small one, and the largest
/// TLS record.
const IDLE_AFTER: [usize; 2] = [100, 16 * 1024];

fn main() {
    // Cargo adds `--bench`.
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    runtime::raise_open_file_limit();
    if arguments.first().is_some_and(|first| first == "--serve") {
        pin(SERVER_CORE);
        return server::run(&arguments[1..]);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "kernel {}, {cores} cores, {}",
        rustix::system::uname().release().to_string_lossy(),
        Driver::choose().unwrap()
    );
    pin(CLIENT_CORE);
    let names = Style::ALL.map(Style::name).join(" | ");
    let begins = |name: &str, title: &str| {
        let chosen = arguments.is_empty() || arguments.iter().any(|argument| argument == name);
        if chosen {
            println!("\n| {title} | {names} |\n|---|---|---|---|");
        }
        chosen
    };
    let cpu = format!("CPU of the server per echo, µs: median of {ROUNDS} (least–most)");
    if begins("cpu", &cpu) {
        LOADS.into_iter().for_each(compare_cpu);
    }
    if begins(
        "memory",
        "resident memory of the server per idle connection, bytes",
    ) {
        IDLE_AFTER.into_iter().for_each(compare_memory);
    }
    if begins("dropped", "the server drops a future that waits") {
        dropped::compare();
    }
}

fn compare_cpu(load: Load) {
    let mut costs = Style::ALL.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (style, costs) in Style::ALL.into_iter().zip(&mut costs) {
            costs.push(client::cpu_per_echo(style, load));
        }
    }
    let columns = costs.map(spread).join(" | ");
    println!(
        "| {} × {} bytes | {columns} |",
        load.connections, load.message
    );
}

fn compare_memory(message: usize) {
    let columns = Style::ALL.map(|style| idle_memory(style, message).to_string());
    println!(
        "| after an echo of {message} bytes | {} |",
        columns.join(" | ")
    );
}

fn idle_memory(style: Style, message: usize) -> usize {
    let server = Server::start(style, "idle", Load::new(1 + IDLE_CONNECTIONS, message, 0));
    let mut first = server.connect();
    client::echo_once(&mut first, message);
    let before = server.resident();
    let mut connections: Vec<_> = (0..IDLE_CONNECTIONS).map(|_| server.connect()).collect();
    for connection in &mut connections {
        client::echo_once(connection, message);
    }
    // After the last echo, its task waits again.
    std::thread::sleep(std::time::Duration::from_millis(200));
    let after = server.resident();
    drop((first, connections));
    server.end();
    after.saturating_sub(before) / IDLE_CONNECTIONS
}

/// Formats values as `median (least–most)`.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let median = values[values.len() / 2];
    format!(
        "{median:.2} ({:.2}–{:.2})",
        values[0],
        values[values.len() - 1]
    )
}

fn pin(core: usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut set = CpuSet::new();
    set.set(core % cores);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
