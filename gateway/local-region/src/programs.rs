//! The installed programs of PostgreSQL, and the user that they run as.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::geteuid;

use crate::Error;

/// Folder of Debian's packages, with a folder for each version.
pub(crate) const INSTALLED: &str = "/usr/lib/postgresql";
/// Oldest version that a region can use.
const OLDEST: u32 = 15;

/// User and group that a program of PostgreSQL runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    pub id: u32,
    pub group: u32,
}

/// The programs of one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Programs {
    folder: PathBuf,
    /// The major version.
    pub(crate) version: u32,
}

impl Programs {
    /// Finds the newest programs in the folders of `path` (the value of `PATH`) and below
    /// `installed`. Those of version `wanted` if there is one.
    pub(crate) fn find(path: &OsStr, installed: &Path, wanted: Option<u32>) -> Result<Self, Error> {
        let below = fs::read_dir(installed)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path().join("bin"));
        let found: BTreeMap<u32, PathBuf> = std::env::split_paths(path)
            .chain(below)
            .filter_map(|folder| of_folder(&folder))
            .collect();
        let newest = match wanted {
            Some(wanted) => found.get_key_value(&wanted),
            None => found.last_key_value(),
        };
        if let Some((version, folder)) = newest.filter(|(version, _)| **version >= OLDEST) {
            return Ok(Self {
                folder: folder.clone(),
                version: *version,
            });
        }
        let known: Vec<String> = found
            .iter()
            .map(|(version, at)| format!("{version} in {}", at.display()))
            .collect();
        let finding = match (wanted, known.is_empty()) {
            (Some(wanted), _) => {
                format!(
                    "the data folder has a database of PostgreSQL {wanted}, which is not installed"
                )
            }
            (None, true) => "PostgreSQL, which the nodes share, is not installed".to_owned(),
            (None, false) => format!(
                "PostgreSQL is too old: {}, but a region needs {OLDEST}",
                known.join(", ")
            ),
        };
        Err(Error::Postgres(format!(
            "{finding} (the programs `initdb` and `postgres` were looked for in PATH and in \
             {}/*/bin). Install it, on Debian with `apt install postgresql`, or name a database: \
             --store postgres://USER@HOST/DATABASE",
            installed.display()
        )))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Version and folder of the programs in `folder`; `None` if they are not there or do not run.
fn of_folder(folder: &Path) -> Option<(u32, PathBuf)> {
    // A link in PATH leads to one of the programs alone.
    let folder = folder
        .join("postgres")
        .canonicalize()
        .ok()?
        .parent()?
        .to_owned();
    if !folder.join("initdb").is_file() {
        return None;
    }
    let asked = Command::new(folder.join("postgres"))
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let version = version(std::str::from_utf8(&asked.stdout).ok()?)?;
    Some((version, folder))
}

/// The major version in a line such as `postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)`.
fn version(line: &str) -> Option<u32> {
    let rest = line.split_once(") ")?.1;
    rest.split(|char: char| !char.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The user that runs PostgreSQL, which refuses to run as root; `None` for the user of this
/// process.
pub(crate) fn user() -> Option<User> {
    geteuid()
        .is_root()
        .then(|| user_of(&fs::read_to_string("/etc/passwd").unwrap_or_default()))
}

/// The user `postgres`, which the package makes; an unprivileged user if there is none.
fn user_of(passwd: &str) -> User {
    let of_name = |name: &str| {
        let mut fields = passwd
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?
            .split(':')
            .skip(1);
        Some(User {
            id: fields.next()?.parse().ok()?,
            group: fields.next()?.parse().ok()?,
        })
    };
    of_name("postgres")
        .or_else(|| of_name("nobody"))
        .unwrap_or(User {
            id: 65_534,
            group: 65_534,
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Writes programs that say this version.
    fn install(folder: &Path, version: &str) {
        fs::create_dir_all(folder).unwrap();
        for name in ["postgres", "initdb"] {
            let path = folder.join(name);
            fs::write(
                &path,
                format!("#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n"),
            )
            .unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    #[test]
    fn the_newest_version_is_found_in_the_path_and_in_the_folder_of_the_packages() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().canonicalize().unwrap().join(name);
        let installed = at("installed");
        let linked = at("linked");
        install(&installed.join("9.6/bin"), "9.6.24");
        install(&installed.join("15/bin"), "15.14 (Debian 15.14-0+deb12u1)");
        let find = |path: &Path, wanted| Programs::find(path.as_os_str(), &installed, wanted);
        let expect = |folder: PathBuf, version| Programs { folder, version };
        assert_eq!(
            find(&at("none"), None).unwrap(),
            expect(installed.join("15/bin"), 15)
        );
        install(&at("elsewhere"), "17beta1");
        fs::create_dir(&linked).unwrap();
        symlink(at("elsewhere/postgres"), linked.join("postgres")).unwrap();
        assert_eq!(find(&linked, None).unwrap(), expect(at("elsewhere"), 17));
        assert_eq!(
            find(&linked, Some(15)).unwrap(),
            expect(installed.join("15/bin"), 15)
        );
        let error = find(&linked, Some(16)).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "the data folder has a database of PostgreSQL 16, which is not installed"
            ),
            "{error}"
        );
    }

    #[test]
    fn missing_and_old_programs_are_reported_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let find = || {
            Programs::find(OsStr::new(""), folder.path(), None)
                .unwrap_err()
                .to_string()
        };
        let error = find();
        for part in [
            "is not installed",
            "`apt install postgresql`",
            "--store postgres://USER@HOST/DATABASE",
        ] {
            assert!(error.contains(part), "{error}");
        }
        install(&folder.path().join("13/bin"), "13.1");
        let error = find();
        assert!(
            error.starts_with("PostgreSQL is too old: 13 in ") && error.contains("needs 15"),
            "{error}"
        );
    }

    #[test]
    fn root_runs_the_server_as_another_user() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65533::/:/x\n\
                      postgres:x:101:104:a,,,:/var:/bin/sh\n";
        assert_eq!(
            user_of(passwd),
            User {
                id: 101,
                group: 104
            }
        );
        assert_eq!(
            user_of(&passwd.replace("postgres:", "other:")),
            User {
                id: 65_534,
                group: 65_533
            }
        );
        assert_eq!(
            user_of(""),
            User {
                id: 65_534,
                group: 65_534
            }
        );
    }
}
