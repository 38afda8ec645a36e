//! Proof that the simulation finds faults: each of the [mutants](list::MUTANTS) breaks its
//! invariant within [`SEEDS`] seeds. And that the tests do: each of the [chosen
//! ones](chosen::MUTANTS) fails a test of its [groups](groups).
//!
//! All faults of a list are put into one copy of the sources, each behind a switch that an
//! environment variable of the running program sets. So the copy is built once, and the product
//! itself has no switch.

mod chosen;
mod copy;
mod edits;
mod groups;
mod list;

use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use chosen::{Chosen, SURVIVORS};
use edits::Edited;
use list::{MUTANTS, Mutant};

/// Seeds in which each mutant must be found.
const SEEDS: u64 = 10_000;
/// Environment variable with the names of mutants to find, separated by commas. All if it is not
/// set. The programs inherit it, and complain of variables that begin with `GW_`.
const ONLY: &str = "MUTANTS";

type Failure = Box<dyn Error>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// The sources with the mutants that the simulation must find.
fn in_simulation(root: &Path) -> Result<Edited, String> {
    let mutants = MUTANTS.iter().map(|mutant| (mutant.name, mutant.edits));
    edits::apply(root, mutants)
}

/// The sources with the mutants that the tests must find.
fn in_tests(root: &Path) -> Result<Edited, String> {
    let mutants = chosen::MUTANTS.iter();
    edits::apply(
        root,
        mutants.map(|it| (it.name, std::slice::from_ref(&it.edit))),
    )
}

#[test]
fn each_edit_has_its_place() {
    for edited in [in_simulation(&root()), in_tests(&root())] {
        if let Err(problem) = edited {
            panic!("{problem}");
        }
    }
}

/// Whether [`ONLY`] names a mutant, or is not set.
fn is_wanted(name: &str) -> bool {
    std::env::var(ONLY).map_or(true, |only| only.split(',').any(|it| it == name))
}

/// Builds all tests and runs many: hours.
#[test]
#[ignore = "takes hours: run it before and after a change of many tests"]
fn each_chosen_mutant_fails_a_test() -> Result<(), Failure> {
    let copy = copy::whole(&root(), &in_tests(&root())?)?;
    let programs = groups::build(&copy)?;
    let mut missed = Vec::new();
    for Chosen { name, edit } in chosen::MUTANTS.iter().filter(|it| is_wanted(it.name)) {
        let began = Instant::now();
        let mut failed = None;
        for group in groups::of(edit.file)? {
            failed = group.first_failure(&programs, name)?;
            if failed.is_some() {
                break;
            }
        }
        let seconds = began.elapsed().as_secs();
        let is_missed = failed.is_none() && !SURVIVORS.contains(name);
        missed.extend(is_missed.then_some(*name));
        let failed = failed.as_deref().unwrap_or("no test");
        writeln!(io::stdout(), "{name}: {failed} ({seconds} s)")?;
    }
    match missed.is_empty() {
        true => Ok(()),
        false => Err(format!("no test fails with {}", missed.join(", ")).into()),
    }
}

/// The first seed that fails.
struct Found {
    seed: u64,
    invariant: String,
    what: String,
}

/// Runs seeds until one fails. `None` if none does.
fn first_failure(
    program: &Path,
    mutant: Option<&str>,
    seeds: u64,
) -> Result<Option<Found>, Failure> {
    let mut command = Command::new(program);
    command.args(["--shrink", "0", "--seeds", &seeds.to_string()]);
    command.env_remove(copy::VARIABLE).stdout(Stdio::piped());
    if let Some(mutant) = mutant {
        command.env(copy::VARIABLE, mutant);
    }
    let mut running = command.spawn()?;
    let stdout = running.stdout.take().ok_or("the program has no output")?;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        let Some(line) = line.strip_prefix("seed ") else {
            continue;
        };
        // The lines of later seeds, which are told in order, are of no use.
        running.kill()?;
        running.wait()?;
        let mut fields = line.splitn(3, ": ");
        let mut next = || fields.next().ok_or(line);
        return Ok(Some(Found {
            seed: next()?.parse()?,
            invariant: next()?.to_owned(),
            what: next()?.to_owned(),
        }));
    }
    let status = running.wait()?;
    if status.success() {
        Ok(None)
    } else {
        Err(format!("{}: {status}", program.display()).into())
    }
}

/// Builds a program and runs many simulations: minutes to hours.
#[test]
#[ignore = "takes long: .github/workflows/weekly.yml runs it"]
fn each_mutant_is_found() -> Result<(), Failure> {
    let is_wanted = |mutant: &&Mutant| is_wanted(mutant.name);
    if !MUTANTS.iter().any(|mutant| is_wanted(&mutant)) {
        return Err(format!("{ONLY} names no mutant").into());
    }
    let program = copy::build(&root())?;
    let mut missed = Vec::new();
    let mut most = 0;
    for Mutant {
        name, invariant, ..
    } in MUTANTS.iter().filter(is_wanted)
    {
        let began = Instant::now();
        let found = first_failure(&program, Some(name), SEEDS)?;
        let seconds = began.elapsed().as_secs();
        let text = match &found {
            Some(found) => format!("seed {}: {}", found.seed, found.invariant),
            None => format!("not found in {SEEDS} seeds"),
        };
        writeln!(io::stdout(), "{name}: {text} ({seconds} s)")?;
        match found {
            Some(found) if found.invariant == *invariant => most = most.max(found.seed),
            Some(found) => missed.push(format!(
                "{name}: seed {} breaks \"{}\" and not \"{invariant}\": {}",
                found.seed, found.invariant, found.what
            )),
            None => missed.push(format!("{name}: {text}")),
        }
    }
    // What the seeds have found are the mutants.
    if let Some(found) = first_failure(&program, None, most + 1)? {
        missed.push(format!(
            "without a mutant, seed {} breaks \"{}\": {}",
            found.seed, found.invariant, found.what
        ));
    }
    if missed.is_empty() {
        Ok(())
    } else {
        Err(missed.join("\n").into())
    }
}
