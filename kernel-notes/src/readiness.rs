//! Two styles of reading from a socket on the ring: wait until it is readable, or give the ring a
//! buffer to fill.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::rc::Rc;
use std::sync::mpsc;

use gw_shared::runtime::{self, Driver};

use crate::echo::{Meter, Style, cost_per_message, serve};
use crate::load::{self, Load};
use crate::measure::{self, median, micros, resident};
use crate::raw_ring;

const ROUNDS: usize = 9;
const SMALL: usize = 100;
const LARGE: usize = 64 * 1024;
const LOADS: [Load; 4] = [
    Load {
        connections: 1,
        message: SMALL,
        messages: 15_000,
        work: 0,
    },
    Load {
        connections: 64,
        message: SMALL,
        messages: 60_000,
        work: 0,
    },
    Load {
        connections: 1,
        message: LARGE,
        messages: 10_000,
        work: 0,
    },
    Load {
        connections: 64,
        message: LARGE,
        messages: 10_000,
        work: 0,
    },
];
/// Loads of the ring without a reactor: numbers of connections, and messages of 100 bytes or large
/// ones.
const LOADS_OF_RING: [Load; 6] = [
    small(1, 15_000),
    small(16, 60_000),
    small(64, 60_000),
    small(256, 60_000),
    LOADS[2],
    LOADS[3],
];

const fn small(connections: usize, messages: usize) -> Load {
    Load {
        connections,
        message: SMALL,
        messages,
        work: 0,
    }
}

const STYLES: [Style; 2] = [Style::Readiness, Style::Completion];

/// Argument that starts the process that measures idle connections.
pub(crate) const IDLE: &str = "idle-memory";
const IDLE_CONNECTIONS: usize = 2000;
/// Size of the message that each connection echoes before it is idle: the largest TLS record.
const IDLE_MESSAGE: usize = 16 * 1024;

pub(crate) fn probe() {
    measure::print_machine();
    println!(
        "driver: {}\nCPU of the server's thread: median of {ROUNDS} (least–most)",
        Driver::choose().unwrap()
    );
    for load in LOADS {
        compare(load);
    }
    for load in LOADS_OF_RING {
        compare_rings(load);
    }
    println!(
        "\nmemory of the server for each idle connection that has echoed {IDLE_MESSAGE} bytes, \
         bytes"
    );
    for style in STYLES {
        let idle = Command::new(std::env::current_exe().unwrap())
            .args([IDLE, &format!("{style:?}")])
            .output()
            .unwrap();
        println!(
            "  {:12} {}",
            format!("{style:?}"),
            String::from_utf8_lossy(&idle.stdout).trim()
        );
    }
}

fn compare(load: Load) {
    let (unit, factor) = if load.message == LARGE {
        ("s per GB", 1e-6 * 1e9 / LARGE as f64)
    } else {
        ("µs per echo", 1.0)
    };
    println!(
        "\n{} connections, messages of {} bytes: {unit}",
        load.connections, load.message
    );
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (style, costs) in STYLES.into_iter().zip(&mut costs) {
            costs.push(
                micros(cost_per_message(Driver::choose().unwrap(), style, load).cpu) * factor,
            );
        }
    }
    for (style, costs) in STYLES.into_iter().zip(&costs) {
        println!("  {:12} {}", format!("{style:?}"), measure::spread(costs));
    }
    println!(
        "  completion ÷ readiness: {:.2}",
        median(costs[1].clone()) / median(costs[0].clone())
    );
}

fn compare_rings(load: Load) {
    let styles = raw_ring::STYLES;
    println!(
        "\nring without a reactor, {} connections, messages of {} bytes: µs per echo, calls of \
         io_uring_enter per echo",
        load.connections, load.message
    );
    let mut costs = styles.map(|_| Vec::new());
    let mut enters = styles.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (number, style) in styles.into_iter().enumerate() {
            let (spent, calls) = raw_ring::cost_per_message(style, load);
            costs[number].push(micros(spent.cpu));
            enters[number].push(calls);
        }
    }
    for (number, style) in styles.into_iter().enumerate() {
        println!(
            "  {:18} {}, {:.2}, ÷ {:?}: {:.2}",
            format!("{style:?}"),
            measure::spread(&costs[number]),
            median(enters[number].clone()),
            styles[0],
            median(costs[number].clone()) / median(costs[0].clone())
        );
    }
}

/// Measures idle connections in a separate process, which has no freed memory that connections
/// could reuse.
pub(crate) fn report_idle_memory(style: &str) {
    runtime::raise_open_file_limit();
    let style = STYLES
        .into_iter()
        .find(|known| format!("{known:?}") == style)
        .unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let meter = Rc::new(Meter::new(0, 0, 0));
        drop(Driver::choose().unwrap().block_on(serve(
            listener,
            IDLE_CONNECTIONS + 1,
            style,
            meter,
        )));
        done.send(()).unwrap();
    });
    let mut buffer = vec![1; IDLE_MESSAGE];
    let mut use_once = |connections: &mut [std::net::TcpStream]| {
        for connection in connections {
            connection.write_all(&buffer).unwrap();
            connection.read_exact(&mut buffer).unwrap();
        }
    };
    let mut first = load::connect(address, 1);
    use_once(&mut first);
    let before = resident();
    let mut connections = load::connect(address, IDLE_CONNECTIONS);
    use_once(&mut connections);
    println!("{}", resident().saturating_sub(before) / IDLE_CONNECTIONS);
    drop((first, connections));
    ended.recv_timeout(load::PATIENCE).unwrap();
}
