//! `gw-gateway agent-program`: the release key, and signed programs that a gateway offers to its agents. Works on files
//! alone, on a machine without a gateway too.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use aws_lc_rs::signature::Ed25519KeyPair;
use clap::Subcommand;
use gw_base::agent_releases::program_files;
use gw_shared::command::Failure;
use gw_shared::files;
use gw_shared::identity::program::{ReleaseKey, SIZE_MAX, SignedProgram, TARGET};
use gw_shared::version::Version;

#[derive(Subcommand)]
pub(crate) enum AgentProgramCommand {
    /// Make a release key, and print its public half for `update_key` of agents. Keep the file offline.
    NewKey {
        /// File for the key; it must not exist.
        file: PathBuf,
    },
    /// Sign an agent program, and put it with its description into a folder for `agent_programs` of a gateway.
    Sign {
        /// File of the release key.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
        /// The program, for example target/release/gw-agent.
        program: PathBuf,
        /// Folder for the signed program; made if it is missing.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
        /// Architecture of the program.
        #[arg(long, default_value = TARGET, value_parser = ["x86_64", "aarch64"])]
        target: String,
        /// Version of the program, if it is not that of gw-gateway.
        #[arg(long = "program-version", value_name = "VERSION", default_value_t = Version::own())]
        version: Version,
        /// Lowest version of signed programs that agents run once they have seen this one, up to its own version: for a version
        /// before which programs are vulnerable.
        #[arg(long, value_name = "VERSION")]
        minimum: Option<Version>,
    },
}

impl AgentProgramCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Self::NewKey { file } => new_key(&file),
            Self::Sign {
                key,
                program,
                out,
                target,
                version,
                minimum,
            } => {
                if let Some(minimum) = minimum.filter(|minimum| *minimum > version) {
                    let message = format!(
                        "--minimum: {minimum} is above the version of the program, {version}"
                    );
                    return Err(Failure::Usage(message));
                }
                let sign_content = |content: &[u8], pair: &Ed25519KeyPair| {
                    SignedProgram::sign_with_minimum(minimum, version, &target, content, pair)
                };
                sign(&key, &program, &out, sign_content)
            }
        }
    }
}

fn new_key(file: &Path) -> Result<(), Failure> {
    let failed = |_| {
        let message = "cannot make a release key: the cryptographic library failed; check that the system has random numbers \
                       (/dev/urandom), and try again";
        Failure::Run(message.to_owned())
    };
    let key = Ed25519KeyPair::generate().map_err(failed)?;
    let document = key.to_pkcs8().map_err(failed)?;
    files::create_private(file, document.as_ref()).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Failure::Usage(format!(
            "{}: the file exists; a release key is never replaced by this command",
            file.display()
        )),
        _ => at(file, &error),
    })?;
    writeln!(io::stdout(), "{}", ReleaseKey::of(&key)).map_err(Failure::run)
}

fn sign(
    key: &Path,
    program: &Path,
    out: &Path,
    sign_content: impl Fn(&[u8], &Ed25519KeyPair) -> SignedProgram,
) -> Result<(), Failure> {
    let document = fs::read(key).map_err(|error| at(key, &error))?;
    let pair = Ed25519KeyPair::from_pkcs8(&document).map_err(|_| {
        Failure::Usage(format!(
            "{}: not a release key, as `gw-gateway agent-program new-key` makes one",
            key.display()
        ))
    })?;
    let content = fs::read(program).map_err(|error| at(program, &error))?;
    if content.len() as u64 > SIZE_MAX {
        let message = format!(
            "{}: larger than {SIZE_MAX} bytes; strip its debug symbols",
            program.display()
        );
        return Err(Failure::Usage(message));
    }
    if !content.starts_with(b"\x7fELF") {
        return Err(Failure::Usage(format!(
            "{}: not a program (no ELF header)",
            program.display()
        )));
    }
    let signed = sign_content(&content, &pair);
    fs::create_dir_all(out).map_err(|error| at(out, &error))?;
    let (file, description) = program_files(out, &signed.target);
    let json = serde_json::to_vec_pretty(&signed).map_err(Failure::run)?;
    // The description comes last: without it, the program is not offered.
    files::remove_if_there(&description).map_err(|error| at(&description, &error))?;
    fs::write(&file, &content).map_err(|error| at(&file, &error))?;
    fs::write(&description, json).map_err(|error| at(&description, &error))?;
    writeln!(
        io::stdout(),
        "{}\n{}",
        file.display(),
        description.display()
    )
    .map_err(Failure::run)
}

fn at(path: &Path, error: &io::Error) -> Failure {
    Failure::Run(format!("{}: {error}", path.display()))
}
