//! Time of a request to a backend that writes head and body separately, without `TCP_NODELAY`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use rustix::net::sockopt::set_tcp_quickack;

use crate::measure::{self, DRIVING_CORE, MEASURED_CORE, Stamp, micros, pin};

const REQUEST: [u8; 100] = [b'r'; 100];
const HEAD: usize = 100;
const BODY: usize = 98;
/// Requests at first, which the kernel acknowledges at once on a new connection.
const WARM_UP: usize = 50;
const REQUESTS: usize = 300;

/// When the client makes the kernel acknowledge at once.
#[derive(Clone, Copy, PartialEq)]
enum Acknowledge {
    Never,
    WhenIncomplete,
    AfterEachRead,
}

pub(crate) fn probe() {
    measure::print_machine();
    // Wakes up the cores.
    requests(&[HEAD + BODY], Acknowledge::Never);
    println!(
        "a request of 100 bytes, a response of 198, over loopback, µs: median (least–most); CPU of \
         the client"
    );
    for (name, pieces) in [
        ("one write", &[HEAD + BODY][..]),
        ("two writes", &[HEAD, BODY]),
    ] {
        for (option, acknowledge) in [
            ("never", Acknowledge::Never),
            ("when incomplete", Acknowledge::WhenIncomplete),
            ("after each read", Acknowledge::AfterEachRead),
        ] {
            let (times, cpu) = requests(pieces, acknowledge);
            println!(
                "  {name}, TCP_QUICKACK {option}: {}, CPU {cpu:.1}",
                measure::spread(&times)
            );
        }
    }
}

/// Microseconds of each request, and CPU time of one.
fn requests(pieces: &'static [usize], acknowledge: Acknowledge) -> (Vec<f64>, f64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    connection.set_nodelay(true).unwrap();
    let backend = listener.accept().unwrap().0;
    let backend = thread::spawn(move || serve(backend, pieces));
    pin(MEASURED_CORE);
    for _ in 0..WARM_UP {
        request(&mut connection, acknowledge);
    }
    let begin = Stamp::thread();
    let times = (0..REQUESTS).map(|_| {
        let began = Instant::now();
        request(&mut connection, acknowledge);
        micros(began.elapsed())
    });
    let times = times.collect();
    let cpu = micros(begin.until(Stamp::thread()).cpu) / REQUESTS as f64;
    drop(connection);
    backend.join().unwrap();
    (times, cpu)
}

fn request(connection: &mut TcpStream, acknowledge: Acknowledge) {
    connection.write_all(&REQUEST).unwrap();
    let mut received = 0;
    while received < HEAD + BODY {
        received += connection.read(&mut [0; 8192]).unwrap();
        let is_incomplete = received < HEAD + BODY;
        if acknowledge == Acknowledge::AfterEachRead
            || (acknowledge == Acknowledge::WhenIncomplete && is_incomplete)
        {
            set_tcp_quickack(&*connection, true).unwrap();
        }
    }
}

fn serve(mut connection: TcpStream, pieces: &[usize]) {
    pin(DRIVING_CORE);
    let response = [b'x'; HEAD + BODY];
    while connection.read_exact(&mut [0; REQUEST.len()]).is_ok() {
        for piece in pieces {
            connection.write_all(&response[..*piece]).unwrap();
        }
    }
}
