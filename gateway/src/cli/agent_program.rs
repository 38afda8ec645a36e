//! `gw-gateway agent-program`: the release key, and signed programs that a gateway offers to its
//! agents. Works on files alone, on a machine without a gateway too.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use aws_lc_rs::signature::Ed25519KeyPair;
use clap::{Args, Subcommand};
use gw_base::agent_releases::program_files;
use gw_shared::command::Failure;
use gw_shared::files;
use gw_shared::identity::program::{ReleaseKey, SIZE_MAX, SignedProgram};
use gw_shared::identity::program_marker::MarkedProgram;
use gw_shared::version::Version;

#[derive(Subcommand)]
pub(crate) enum AgentProgramCommand {
    /// Make a release key, and print its public half for `update_key` of agents. Keep the file
    /// offline.
    NewKey {
        /// File for the key; it must not exist.
        file: PathBuf,
    },
    /// Sign an agent program, and put it with its description into a folder for `agent_programs` of
    /// a gateway.
    Sign {
        #[command(flatten)]
        files: SignedFiles,
        /// Lowest version of signed programs that agents run once they have seen this one, up to
        /// its own version: for a version before which programs are vulnerable.
        #[arg(long, value_name = "VERSION")]
        minimum: Option<Version>,
        /// Replace the program for this architecture that the folder has.
        #[arg(long)]
        replace: bool,
    },
    /// Sign an older program that replaces the newer one in the folder: agents go back to it.
    RollBack {
        #[command(flatten)]
        files: SignedFiles,
    },
}

#[derive(Args)]
pub(crate) struct SignedFiles {
    /// File of the release key.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// The program, for example target/release/gw-agent.
    program: PathBuf,
    /// Folder for the signed program; made if it is missing.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

/// A program that is to be signed, and what its folder has for the same architecture.
struct Draft {
    pair: Ed25519KeyPair,
    content: Vec<u8>,
    description: SignedProgram,
    /// The program in the folder, if there is one.
    present: Option<SignedProgram>,
}

impl AgentProgramCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Self::NewKey { file } => new_key(&file),
            Self::Sign {
                files,
                minimum,
                replace,
            } => {
                let mut draft = files.read()?;
                let version = draft.description.version;
                if let Some(minimum) = minimum.filter(|minimum| *minimum > version) {
                    let message = format!(
                        "--minimum: {minimum} is above the version of the program, {version}"
                    );
                    return Err(Failure::Usage(message));
                }
                draft.description.minimum = minimum;
                if let Some(present) = draft.present.as_ref().filter(|_| !replace) {
                    return Err(Failure::Usage(format!(
                        "{} has version {} for {} already; --replace replaces it, or name another \
                         folder with --out",
                        files.out.display(),
                        present.version,
                        present.target
                    )));
                }
                files.write(draft)
            }
            Self::RollBack { files } => {
                let mut draft = files.read()?;
                let SignedProgram {
                    version, target, ..
                } = &draft.description;
                let Some(present) = &draft.present else {
                    return Err(Failure::Usage(format!(
                        "{} has no program for {target} that could be replaced; name the folder \
                         that the gateway offers with --out",
                        files.out.display()
                    )));
                };
                // A roll-back that was rolled back further replaces all that the first one did.
                let replaces = present.replaces.max(Some(present.version));
                if present.version <= *version {
                    return Err(Failure::Usage(format!(
                        "{} is version {version}, and {} offers {}, which is not newer; use \
                         `agent-program sign`",
                        files.program.display(),
                        files.out.display(),
                        present.version
                    )));
                }
                draft.description.replaces = replaces;
                files.write(draft)
            }
        }
    }
}

impl SignedFiles {
    /// Reads key and program, and the description in the folder.
    fn read(&self) -> Result<Draft, Failure> {
        let Self { key, program, out } = self;
        let document =
            fs::read(key).map_err(|error| Failure::Run(files::cannot_read(key, &error)))?;
        let pair = Ed25519KeyPair::from_pkcs8(&document).map_err(|_| {
            Failure::Usage(format!(
                "{}: not a release key, as `gw-gateway agent-program new-key` makes one",
                key.display()
            ))
        })?;
        let content =
            fs::read(program).map_err(|error| Failure::Run(files::cannot_read(program, &error)))?;
        if content.len() as u64 > SIZE_MAX {
            let message = format!(
                "{}: larger than {SIZE_MAX} bytes; strip its debug symbols",
                program.display()
            );
            return Err(Failure::Usage(message));
        }
        let MarkedProgram {
            target,
            version,
            keys,
        } = MarkedProgram::read(&content).map_err(|error| {
            Failure::Usage(format!(
                "{}: {error}; name the file of a gw-agent",
                program.display()
            ))
        })?;
        let public = ReleaseKey::of(&pair);
        if !keys.is_empty() && !keys.contains(&public) {
            let built_in: Vec<String> = keys.iter().map(ToString::to_string).collect();
            return Err(Failure::Usage(format!(
                "{}: it is built to accept programs by the release key {}, and {} is {public}: \
                 agents that run it could not be updated with this key; sign with the other key, \
                 or build it with GW_RELEASE_KEY={public}",
                program.display(),
                built_in.join(" or "),
                key.display()
            )));
        }
        let (_, file) = program_files(out, target);
        let present = match fs::read(&file) {
            Ok(text) => Some(serde_json::from_slice(&text).map_err(|error| {
                Failure::Usage(format!(
                    "{}: not the description of a signed program: {error}; remove it, or name \
                     another folder with --out",
                    file.display()
                ))
            })?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(at(&file, &error)),
        };
        let description = SignedProgram::describe(version, target, &content);
        Ok(Draft {
            pair,
            content,
            description,
            present,
        })
    }

    /// Signs the program, and writes it with its description.
    fn write(&self, draft: Draft) -> Result<(), Failure> {
        let Draft {
            pair,
            content,
            description,
            present,
        } = draft;
        let signed = description.signed(&pair);
        let out = &self.out;
        fs::create_dir_all(out).map_err(|error| at(out, &error))?;
        let (file, description) = program_files(out, &signed.target);
        let json = serde_json::to_vec_pretty(&signed).map_err(Failure::run)?;
        // The description comes last: without it, the program is not offered.
        files::remove_if_there(&description).map_err(|error| at(&description, &error))?;
        fs::write(&file, &content).map_err(|error| at(&file, &error))?;
        fs::write(&description, json).map_err(|error| at(&description, &error))?;
        let replaced = present.map_or_else(String::new, |present| {
            format!(", in place of version {}", present.version)
        });
        writeln!(
            io::stdout(),
            "{}\n{}\nSigned: gw-agent {} for {}{replaced}",
            file.display(),
            description.display(),
            signed.version,
            signed.target
        )
        .map_err(Failure::run)
    }
}

fn new_key(file: &Path) -> Result<(), Failure> {
    let failed = |_| {
        let message = "cannot make a release key: the cryptographic library failed; check that the \
                       system has random numbers (/dev/urandom), and try again";
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

fn at(path: &Path, error: &io::Error) -> Failure {
    Failure::Run(format!("{}: {error}", path.display()))
}
