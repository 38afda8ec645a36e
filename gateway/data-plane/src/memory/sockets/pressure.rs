//! Memory for TCP of the machine: limits of the kernel, and memory in use.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gw_base::process::background::Tasks;
use tokio::time::sleep;

use super::SocketBudget;

/// Interval between measurements.
const INTERVAL: Duration = Duration::from_millis(250);

/// Limits of the kernel on the memory of all TCP sockets (`net.ipv4.tcp_mem`, tcp(7)), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpMemory {
    /// Above this, the kernel throttles every connection.
    pub pressure: usize,
    /// Above this, the kernel sends and receives nothing.
    pub limit: usize,
}

impl TcpMemory {
    /// The limits of this machine; `None` if the kernel does not show them, as in some containers.
    pub fn of_machine() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/sys/net/ipv4/tcp_mem").ok()?)
    }

    /// Parses three numbers of pages: low, pressure, high.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text
            .split_whitespace()
            .skip(1)
            .map_while(|number| number.parse::<usize>().ok());
        let pages = |count: usize| count.saturating_mul(rustix::param::page_size());
        Some(Self {
            pressure: pages(numbers.next()?),
            limit: pages(numbers.next()?),
        })
    }

    /// Bytes that all TCP sockets of the machine hold.
    pub fn used() -> Option<usize> {
        parse_used(&fs::read_to_string("/proc/net/sockstat").ok()?)
    }

    /// Memory in use from which connections are reset: below the pressure limit of the kernel.
    pub fn mark(self) -> usize {
        self.pressure / 8 * 7
    }
}

/// Parses the number of pages (`mem`) in the line of TCP.
fn parse_used(sockstat: &str) -> Option<usize> {
    let line = sockstat
        .lines()
        .find_map(|line| line.strip_prefix("TCP:"))?;
    let mut words = line
        .split_whitespace()
        .skip_while(|word| *word != "mem")
        .skip(1);
    Some(
        words
            .next()?
            .parse::<usize>()
            .ok()?
            .saturating_mul(rustix::param::page_size()),
    )
}

impl TcpMemory {
    /// Says that the memory is nearly used up, and what to do.
    pub fn advice(&self) -> String {
        let page = rustix::param::page_size();
        let [pressure, limit] = [self.pressure, self.limit].map(|bytes| 2 * bytes / page);
        format!(
            "TCP memory of this machine is nearly used up: of {} MiB at which the kernel slows all \
             connections, {} MiB are in use; the connections that hold the most are reset. Double \
             the limit with `sysctl -w net.ipv4.tcp_mem=\"{} {pressure} {limit}\"` (pages of \
             {page} bytes), and keep it in /etc/sysctl.d; or find the process that holds the \
             memory with `ss -tmp`",
            self.pressure >> 20,
            Self::used().unwrap_or_default() >> 20,
            pressure * 3 / 4
        )
    }
}

/// Starts to tell the workers when the TCP memory of the machine runs short.
pub fn watch(tasks: &Tasks, memory: TcpMemory, budget: Arc<SocketBudget>) {
    let watch = async move {
        loop {
            sleep(INTERVAL).await;
            // The kernel answers from memory, so this does not block.
            let is_pressed = TcpMemory::used().is_some_and(|used| used >= memory.mark());
            if budget.is_pressed.swap(is_pressed, Ordering::Relaxed) != is_pressed && is_pressed {
                tracing::warn!("{}", memory.advice());
            }
        }
    };
    tasks.spawn_until_stopped("the watch of TCP memory", watch);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_converted_to_bytes() {
        let page = rustix::param::page_size();
        let memory = TcpMemory::parse("287898\t383867\t575796\n").unwrap();
        assert_eq!(
            memory,
            TcpMemory {
                pressure: 383_867 * page,
                limit: 575_796 * page
            }
        );
        let advice = memory.advice();
        assert!(
            advice.contains("net.ipv4.tcp_mem=\"575800 767734 1151592\""),
            "{advice}"
        );
        assert_eq!(TcpMemory::parse("1 2"), None);
        assert_eq!(TcpMemory::parse("a b c"), None);
        let sockstat =
            "sockets: used 14\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 109\nUDP: inuse 0 mem 7\n";
        assert_eq!(parse_used(sockstat), Some(109 * page));
        assert_eq!(parse_used("UDP: inuse 0 mem 7\n"), None);
    }
}
