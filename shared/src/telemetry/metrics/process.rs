//! Metrics of this process, read from `/proc`, with the names that Prometheus' client libraries
//! use.

use std::fs;

use super::{Exposition, Kind};

/// Clock ticks per second in `/proc`: USER_HZ, which the kernel's ABI fixes.
const TICKS_PER_SECOND: f64 = 100.0;

/// Writes memory, CPU time, open files and start time of this process. Omits values that cannot be
/// read.
pub fn write(out: &mut Exposition) {
    if let Some(stat) = fs::read_to_string("/proc/self/stat")
        .ok()
        .and_then(|text| Stat::parse(&text))
    {
        let cpu = stat.cpu_ticks as f64 / TICKS_PER_SECOND;
        let help = "User and system CPU time of the process.";
        out.single("process_cpu_seconds_total", Kind::Counter, help, cpu);
        let memory = stat.resident_pages * rustix::param::page_size() as u64;
        out.single(
            "process_resident_memory_bytes",
            Kind::Gauge,
            "Resident memory of the process.",
            memory,
        );
        let help = "Virtual memory of the process.";
        out.single(
            "process_virtual_memory_bytes",
            Kind::Gauge,
            help,
            stat.virtual_bytes,
        );
        out.single(
            "process_threads",
            Kind::Gauge,
            "Threads of the process.",
            stat.threads,
        );
        if let Some(booted) = boot_time() {
            let started = booted as f64 + stat.started_ticks as f64 / TICKS_PER_SECOND;
            let help = "Start time of the process since the Unix epoch in seconds.";
            out.single("process_start_time_seconds", Kind::Gauge, help, started);
        }
    }
    if let Some(open) = open_files() {
        out.single(
            "process_open_fds",
            Kind::Gauge,
            "Open file descriptors of the process.",
            open,
        );
    }
    if let Some(most) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current {
        out.single(
            "process_max_fds",
            Kind::Gauge,
            "Maximum number of open file descriptors of the process.",
            most,
        );
    }
}

/// Number of open file descriptors of this process.
pub fn open_files() -> Option<usize> {
    // The descriptor of the directory itself is not counted.
    Some(
        fs::read_dir("/proc/self/fd")
            .ok()?
            .count()
            .saturating_sub(1),
    )
}

/// Boot time of the machine in seconds since the Unix epoch.
fn boot_time() -> Option<u64> {
    fs::read_to_string("/proc/stat")
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()
}

/// Fields of `/proc/self/stat` (proc_pid_stat(5)).
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    cpu_ticks: u64,
    threads: u64,
    started_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The second field, the program's name, may contain spaces and parentheses.
        let (_, after) = text.rsplit_once(')')?;
        let fields: Vec<&str> = after.split_whitespace().collect();
        // Numbers of the manual: `fields` begins with field 3.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            started_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_fields_after_a_name_with_parentheses() {
        let text = "42 (a) (b c)) S 7 42 42 0 -1 4194560 1 2 3 4 150 25 0 0 20 0 9 0 100 5000 17 \
                    18446744073709551615";
        let expected = Stat {
            cpu_ticks: 175,
            threads: 9,
            started_ticks: 100,
            virtual_bytes: 5000,
            resident_pages: 17,
        };
        assert_eq!(Stat::parse(text), Some(expected));
        assert_eq!(Stat::parse("42 (cut"), None);
    }

    #[test]
    fn writes_memory_files_and_start_time_of_this_process() {
        let mut out = Exposition::default();
        write(&mut out);
        let text = out.into_text();
        let value = |name: &str| -> f64 {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        assert!(value("process_resident_memory_bytes ") > 1e5, "{text}");
        let open = value("process_open_fds ");
        assert!(open >= 3.0 && value("process_max_fds ") >= open, "{text}");
        assert!(value("process_start_time_seconds ") > 1.7e9, "{text}");
        assert!(value("process_threads ") >= 1.0, "{text}");
    }
}
