//! Counts the instructions per request of whole relays in memory, and compares them with a
//! baseline: benches/README.md.
//!
//! The program runs itself below valgrind's callgrind once for each scenario. Callgrind counts from
//! the call of [`begin`] to the end of the process.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a bench stops on any failure, and reports to the terminal"
)]

mod http2_caller;
mod scenarios;
mod world;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use gw_benches::{Counts, GROWTH_MAX, Verdict, compare, table};
use gw_shared::process::allocator::Allocator;

use self::scenarios::{ALL, Scenario};

/// The product's allocator.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const BASELINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/baselines/instructions.txt");

const USAGE: &str = "usage: benches/instructions [--update] [NAME...]

Counts the instructions per request of all scenarios, or of those with one of these words in their \
names, and compares
them with benches/baselines/instructions.txt. Fails if a scenario has grown by more than 3 %.

  --update   writes the counts to the baseline";

fn main() -> ExitCode {
    let mut update = false;
    let mut words = Vec::new();
    // Cargo adds `--bench`.
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Below callgrind.
            "--relay" => return relay(&arguments.next().unwrap()),
            "--update" => update = true,
            word if !word.starts_with('-') => words.push(argument),
            "--help" => {
                println!("{USAGE}");
                return ExitCode::SUCCESS;
            }
            _ => {
                eprintln!("{USAGE}");
                return ExitCode::from(2);
            }
        }
    }
    let chosen: Vec<&Scenario> = ALL
        .iter()
        .filter(|scenario| {
            words.is_empty() || words.iter().any(|word| scenario.name.contains(word))
        })
        .collect();
    if chosen.is_empty() {
        eprintln!("no scenario has any of these in its name: {words:?}");
        return ExitCode::from(2);
    }
    match count_all(&chosen).and_then(|now| report(now, update)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn relay(name: &str) -> ExitCode {
    let scenario = ALL.iter().find(|scenario| scenario.name == name).unwrap();
    scenarios::relay(scenario, begin);
    ExitCode::SUCCESS
}

/// Marks the begin of the measured part: callgrind finds this function by its name and resets its
/// counters there.
#[inline(never)]
fn begin() {
    std::hint::black_box(());
}

fn count_all(chosen: &[&Scenario]) -> Result<Counts, String> {
    let mut counts = Counts {
        environment: environment()?,
        ..Counts::default()
    };
    for scenario in chosen {
        counts
            .scenarios
            .insert(scenario.name.to_owned(), count(scenario)?);
    }
    Ok(counts)
}

/// The compiler, and the features of the processor that valgrind passes on and the C library
/// chooses its copies by. Processors of two vendors with these features differed by 0.3 %.
fn environment() -> Result<String, String> {
    const FEATURES: [&str; 2] = ["avx2", "erms"];
    let compiler = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()))
        .arg("--version")
        .output();
    let compiler = compiler.map_err(|error| format!("rustc --version: {error}"))?;
    let processor = std::fs::read_to_string("/proc/cpuinfo")
        .map_err(|error| format!("/proc/cpuinfo: {error}"))?;
    let flags = processor
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    let features = FEATURES
        .into_iter()
        .filter(|feature| flags.split(' ').any(|flag| flag == *feature));
    let features: Vec<&str> = features.collect();
    let compiler = String::from_utf8_lossy(&compiler.stdout);
    Ok(format!("{}, {}", compiler.trim(), features.join(" ")))
}

/// Instructions per request. Leaves the profile in the target folder.
fn count(scenario: &Scenario) -> Result<u64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let profile = profile_of(scenario, &program);
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--zero-before=*instructions*begin*"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(program)
        .args(["--relay", scenario.name])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| {
            format!("valgrind cannot be started: {error}; the Debian package is valgrind")
        })?;
    if !run.status.success() {
        return Err(format!(
            "{}: {}\n{}",
            scenario.name,
            run.status,
            String::from_utf8_lossy(&run.stderr)
        ));
    }
    let text = std::fs::read_to_string(&profile)
        .map_err(|error| format!("{}: {error}", profile.display()))?;
    // Otherwise the start is counted, too.
    if !text.contains("instructions::begin") {
        return Err(format!(
            "{}: valgrind has not found the functions of the program",
            profile.display()
        ));
    }
    let total: Option<u64> = text
        .lines()
        .find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok());
    let total = total.ok_or_else(|| format!("{}: no totals", profile.display()))?;
    Ok(total / u64::from(scenario.requests))
}

fn profile_of(scenario: &Scenario, program: &Path) -> PathBuf {
    program.with_file_name(format!("callgrind.{}", scenario.name))
}

fn report(now: Counts, update: bool) -> Result<ExitCode, String> {
    let text = std::fs::read_to_string(BASELINE).unwrap_or_default();
    let mut baseline =
        Counts::parse(&text).map_err(|line| format!("{BASELINE}: not understood: {line}"))?;
    print!("{}", table(&baseline, &now));
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    println!(
        "Profiles: callgrind_annotate --threshold=100 {}",
        program.with_file_name("callgrind.SCENARIO").display()
    );
    if update {
        // Counts of another environment do not stay.
        if baseline.environment != now.environment {
            baseline = Counts {
                environment: now.environment,
                ..Counts::default()
            };
        }
        baseline.scenarios.extend(now.scenarios);
        std::fs::write(BASELINE, baseline.to_text())
            .map_err(|error| format!("{BASELINE}: {error}"))?;
        println!("Written: {BASELINE}");
        return Ok(ExitCode::SUCCESS);
    }
    Ok(match compare(&baseline, &now) {
        Verdict::Kept => ExitCode::SUCCESS,
        Verdict::OtherEnvironment => {
            println!(
                "Not compared: the baseline is of {}, this is {}. `benches/instructions --update` \
                 on the state before your change writes a baseline of this environment.",
                baseline.environment, now.environment
            );
            ExitCode::SUCCESS
        }
        Verdict::Missing(names) => {
            eprintln!(
                "Not in the baseline: {}. `benches/instructions --update` adds them.",
                names.join(", ")
            );
            ExitCode::FAILURE
        }
        Verdict::Grown(names) => {
            eprintln!(
                "More than {GROWTH_MAX} % more instructions per request: {}. If the change is \
                 worth it, say why in the commit, with the baseline that `benches/instructions \
                 --update` writes.",
                names.join(", ")
            );
            ExitCode::FAILURE
        }
    })
}
