//! The program `rathole`: where it is, and keys for its Noise transport.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::{Failure, ensure};
use crate::machine::process;

/// How to install the program. With `--locked`, version 0.5.0 takes dependencies that a current
/// compiler refuses.
const INSTALL: &str =
    "cargo install rathole --version 0.5.0 --no-default-features --features server,client,noise";

#[derive(Debug)]
pub(crate) struct Rathole {
    pub(crate) program: PathBuf,
    pub(crate) private_key: String,
    pub(crate) public_key: String,
}

impl Rathole {
    /// Finds the program at `path`, or else on the search path, and makes a pair of keys.
    pub(crate) fn find(path: Option<&Path>) -> Result<Self, Failure> {
        let program = match path {
            Some(path) => path.to_owned(),
            None => process::find("rathole", "rathole").map_err(|_| {
                Failure::new(format!(
                    "rathole is not installed: {INSTALL}; or give --rathole PATH"
                ))
            })?,
        };
        let output = Command::new(&program)
            .arg("--genkey")
            .output()
            .map_err(|error| Failure::during(program.display(), error))?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure(output.status.success(), || {
            format!(
                "{} --genkey ended with {}",
                program.display(),
                output.status
            )
        })?;
        let (private_key, public_key) = keys(&text)
            .ok_or_else(|| Failure::new(format!("{} --genkey: {text}", program.display())))?;
        Ok(Self {
            program,
            private_key,
            public_key,
        })
    }
}

/// The private and the public key in the output of `rathole --genkey`, each on the line after its
/// heading.
fn keys(text: &str) -> Option<(String, String)> {
    let after = |heading: &str| {
        let mut lines = text.lines().skip_while(|line| !line.starts_with(heading));
        lines
            .nth(1)
            .map(|key| key.trim().to_owned())
            .filter(|key| !key.is_empty())
    };
    Some((after("Private Key:")?, after("Public Key:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_below_their_headings() {
        let text = "Private Key:\nprivate=\n\nPublic Key:\npublic=\n";
        assert_eq!(
            keys(text),
            Some(("private=".to_owned(), "public=".to_owned()))
        );
        assert_eq!(keys("Private Key:\nprivate=\n\nPublic Key:\n"), None);
    }

    #[test]
    fn a_missing_program_is_named() {
        let message = Rathole::find(Some(Path::new("/no/such/rathole")))
            .unwrap_err()
            .to_string();
        assert!(message.starts_with("/no/such/rathole: "), "{message}");
    }
}
