//! Renewal information (RFC 9773), which Pebble 2.4 does not have: its directory is served by the
//! test, with one member more.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gw_acme::schedule::Window;
use gw_acme::{Orders, RenewalInfo, Rfc2136, State};
use gw_base::clock::Timestamp;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::programs::usable;
use super::{PROGRAMS, everything, issue, run, settings, updates};

/// Answers every path with the directory of an authority at `address`, and the renewal information
/// with `info`.
fn serve(listener: &TcpListener, info: &str) {
    let address = listener.local_addr().unwrap();
    let directory = format!(
        r#"{{"newNonce":"http://{address}/n","newAccount":"http://{address}/a",
            "newOrder":"http://{address}/o","renewalInfo":"http://{address}/ari"}}"#
    );
    for stream in listener.incoming() {
        let mut stream = BufReader::new(stream.unwrap());
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let mut rest = String::new();
        while stream.read_line(&mut rest).unwrap() > 2 {}
        let body = match line.starts_with("GET /ari/") {
            true => info,
            false => &directory,
        };
        write!(
            stream.get_mut(),
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nRetry-After: 21600\r\n\
             Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
    }
}

#[test]
fn the_window_of_the_directory_is_read_and_pebble_has_none() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, pebble, orders) = everything(|options| options);
    let mut state = State::default();
    run(issue(&orders, &mut state)).unwrap();
    let answer = run(orders.renewal_info(&state)).unwrap();
    assert_eq!(answer, RenewalInfo::NotOffered);

    let at = |time: i64| {
        OffsetDateTime::from_unix_timestamp(time)
            .unwrap()
            .format(&Rfc3339)
            .unwrap()
    };
    let info = format!(
        r#"{{"suggestedWindow":{{"start":"{}","end":"{}"}}}}"#,
        at(1000),
        at(2000)
    );
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut with_info = settings(&pebble);
    with_info.directory = format!("http://{}/dir", listener.local_addr().unwrap());
    thread::spawn(move || serve(&listener, &info));
    state.account.as_mut().unwrap().directory = with_info.directory.clone();
    let orders = Orders::new(with_info, Arc::new(Rfc2136::new(updates(&named))));
    let answer = run(orders.renewal_info(&state)).unwrap();
    let RenewalInfo::Window { window, ask_again } = answer else {
        panic!("{answer:?}")
    };
    let expected = Window {
        start: Timestamp(1000),
        end: Timestamp(2000),
    };
    assert_eq!(window, expected);
    assert!(ask_again <= Duration::from_secs(21600) && ask_again > Duration::from_secs(21000));
}
