//! The Prometheus metrics of the product.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::failure::{Failure, ensure};

const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_MAX: u64 = 4 * 1024 * 1024;

/// Current sum of the samples of one metric.
pub(crate) fn read(admin_url: &str, name: &str) -> Result<u64, Failure> {
    sum(&scrape(admin_url)?, name)
        .ok_or_else(|| Failure::new(format!("the metrics have no {name}")))
}

/// Current value of this metric of each service that has one.
pub(crate) fn of_services(admin_url: &str, name: &str) -> Result<HashMap<String, u64>, Failure> {
    Ok(services_in(&scrape(admin_url)?, name))
}

fn services_in(text: &str, name: &str) -> HashMap<String, u64> {
    let samples = text.lines().filter_map(|line| {
        let (labels, value) = line
            .strip_prefix(name)?
            .strip_prefix('{')?
            .rsplit_once("} ")?;
        let label = labels.split_once("service=\"")?.1.split('"').next()?;
        Some((label.to_owned(), value.trim().parse().ok()?))
    });
    samples.collect()
}

/// Reasons for refused and closed connections, with their counts.
pub(crate) fn reasons(admin_url: &str) -> Result<String, Failure> {
    let text = scrape(admin_url)?;
    let families = [
        "gw_connections_turned_away_total{",
        "gw_connections_ended_early_total{",
        "gw_handshake_failures_total ",
    ];
    let samples = text
        .lines()
        .filter(|line| families.iter().any(|family| line.starts_with(family)));
    Ok(samples.map(str::trim_end).collect::<Vec<_>>().join(", "))
}

fn scrape(admin_url: &str) -> Result<String, Failure> {
    let bad = || Failure::new(format!("not http://address:port: {admin_url}"));
    let address: SocketAddr = admin_url
        .strip_prefix("http://")
        .and_then(|rest| rest.parse().ok())
        .ok_or_else(bad)?;
    let mut socket = TcpStream::connect_timeout(&address, PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    write!(
        socket,
        "GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    socket.take(ANSWER_MAX).read_to_string(&mut answer)?;
    ensure(answer.starts_with("HTTP/1.1 200"), || {
        "no metrics from the admin listener".to_owned()
    })?;
    Ok(answer)
}

fn sum(text: &str, name: &str) -> Option<u64> {
    let samples = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = rest.strip_prefix(' ').or_else(|| {
            rest.strip_prefix('{')?
                .rsplit_once("} ")
                .map(|(_, value)| value)
        });
        value?.trim().parse::<u64>().ok()
    });
    samples.fold(None, |sum, value| Some(sum.unwrap_or(0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_family_are_added_up() {
        let text = "# TYPE gw_slots gauge\ngw_slots{a=\"1\"} 2\ngw_slots{a=\"2\"} 3\n\
                    gw_slots_in_use 9\ngw_total 7\r\n";
        assert_eq!(sum(text, "gw_slots"), Some(5));
        assert_eq!(sum(text, "gw_total"), Some(7));
        assert_eq!(sum(text, "gw_other"), None);
    }

    #[test]
    fn samples_have_the_names_of_their_services() {
        let text = "gw_tunnels{service=\"a--b\"} 1\ngw_tunnels{service=\"a--c\"} 0\n\
                    gw_tunnels_max{service=\"a--d\"} 1\n";
        let expected = [("a--b".to_owned(), 1), ("a--c".to_owned(), 0)];
        assert_eq!(services_in(text, "gw_tunnels"), HashMap::from(expected));
    }
}
