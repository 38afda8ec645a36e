//! The Prometheus metrics of the product.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::failure::{Failure, ensure};

const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_MAX: u64 = 4 * 1024 * 1024;
const POLL: Duration = Duration::from_millis(100);
/// Agents report their slots once a second, so a zero that lasts longer is current.
const SETTLED_FOR: Duration = Duration::from_millis(1500);

/// Waits until no request is in a slot of the agent or in flight in the gateway. Returns the
/// elapsed time.
pub(crate) fn wait_until_idle(admin_url: &str, within: Duration) -> Result<Duration, Failure> {
    let start = Instant::now();
    let mut idle_since = None;
    loop {
        let text = scrape(admin_url)?;
        let now = Instant::now();
        let busy =
            ["gw_tunnel_slots_in_use", "gw_tunnel_in_flight"].map(|name| (name, sum(&text, name)));
        if let Some((name, _)) = busy.iter().find(|(_, value)| value.is_none()) {
            return Err(Failure::new(format!("the metrics have no {name}")));
        }
        // Without a tunnel the sums are zero as well.
        ensure(
            sum(&text, "gw_tunnels").is_some_and(|tunnels| tunnels > 0),
            || "the tunnel is closed".to_owned(),
        )?;
        if busy.iter().all(|(_, value)| *value == Some(0)) {
            let since = *idle_since.get_or_insert(now);
            if now - since >= SETTLED_FOR {
                return Ok(since - start);
            }
        } else {
            idle_since = None;
        }
        ensure(now - start < within + SETTLED_FOR, || {
            format!("not idle after {within:?}: {busy:?}")
        })?;
        std::thread::sleep(POLL);
    }
}

/// Current sum of the samples of one metric.
pub(crate) fn read(admin_url: &str, name: &str) -> Result<u64, Failure> {
    sum(&scrape(admin_url)?, name)
        .ok_or_else(|| Failure::new(format!("the metrics have no {name}")))
}

/// Current value of the sample of one service; 0 without one.
pub(crate) fn read_of_service(admin_url: &str, name: &str, label: &str) -> Result<u64, Failure> {
    let text = scrape(admin_url)?;
    let label = format!("service=\"{label}\"");
    let samples: String = text
        .lines()
        .filter(|line| line.contains(&label))
        .map(|line| format!("{line}\n"))
        .collect();
    Ok(sum(&samples, name).unwrap_or_default())
}

/// Services that have a sample of this metric above 0.
pub(crate) fn services_with(admin_url: &str, name: &str) -> Result<HashSet<String>, Failure> {
    Ok(services_in(&scrape(admin_url)?, name))
}

fn services_in(text: &str, name: &str) -> HashSet<String> {
    let labels = text.lines().filter_map(|line| {
        let (labels, value) = line
            .strip_prefix(name)?
            .strip_prefix('{')?
            .rsplit_once("} ")?;
        let label = labels.split_once("service=\"")?.1.split('"').next()?;
        (value.trim() != "0").then(|| label.to_owned())
    });
    labels.collect()
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
    fn services_with_a_sample_above_0() {
        let text = "gw_tunnels{service=\"a--b\"} 1\ngw_tunnels{service=\"a--c\"} 0\n\
                    gw_tunnels_max{service=\"a--d\"} 1\n";
        assert_eq!(
            services_in(text, "gw_tunnels"),
            HashSet::from(["a--b".to_owned()])
        );
    }
}
