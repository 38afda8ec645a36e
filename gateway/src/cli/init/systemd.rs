//! The gateway as a service of systemd: its unit, its user, its start.

use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use std::{fs, io};

use gw_base::process::file_owner::FileOwner;
use gw_control_plane::admin_client::AdminAddress;
use gw_interface::config::Config;
use gw_shared::command::Failure;
use rustix::fs::OFlags;

use super::answers::{Answers, CONFIG_OF_ROOT, DATA_DIR_OF_ROOT};
use super::configuration::put;
use super::say;
use crate::cli::client::connection::healthy;

const UNIT: &str = include_str!("../../../../packaging/systemd/gw-gateway.service");
const UNIT_NAME: &str = "gw-gateway";
/// The user in the unit.
const USER: &str = "gw-gateway";
/// Where packages install units, and where administrators do.
const PACKAGED: [&str; 2] = [
    "/usr/lib/systemd/system/gw-gateway.service",
    "/lib/systemd/system/gw-gateway.service",
];
const OWN: &str = "/etc/systemd/system/gw-gateway.service";
/// Folders that the unit hides from the gateway (`ProtectHome=`, `PrivateTmp=`).
const HIDDEN: [&str; 5] = ["/home", "/root", "/run/user", "/tmp", "/var/tmp"];
/// Longest wait until a started gateway is ready.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// A machine that systemd has booted, and what is to be done there.
#[derive(Debug)]
pub(super) struct Systemd {
    program: PathBuf,
    config: PathBuf,
    /// Text of the unit to write to [`OWN`]; `None` if the package's fits, or if it is there.
    unit: Option<String>,
}

impl Systemd {
    /// `None` if systemd does not run. Refuses what the unit cannot reach, and a unit of an
    /// administrator.
    pub(super) fn of_this_machine(answers: &Answers, force: bool) -> Result<Option<Self>, Failure> {
        if !Path::new("/run/systemd/system").exists() {
            return Ok(None);
        }
        let program = std::env::current_exe()
            .map_err(|error| Failure::Run(format!("this program: {error}")))?;
        let tls = answers
            .tls
            .iter()
            .flat_map(|(certificate, key)| [certificate.as_path(), key.as_path()]);
        for path in [program.as_path(), &answers.config, &answers.data_dir]
            .into_iter()
            .chain(tls)
        {
            check_reachable(path)?;
        }
        let fits_package = answers.config == Path::new(CONFIG_OF_ROOT)
            && answers.data_dir == Path::new(DATA_DIR_OF_ROOT);
        let is_packaged = fits_package && PACKAGED.iter().any(|path| Path::new(path).exists());
        let wanted =
            (!is_packaged).then(|| unit_text(&program, &answers.config, &answers.data_dir));
        let unit = match (wanted, fs::read_to_string(OWN)) {
            (Some(wanted), Ok(existing)) if existing == wanted => None,
            (Some(wanted), Ok(_)) if force => Some(wanted),
            (Some(_), Ok(_)) => {
                return Err(Failure::Usage(format!(
                    "init: {OWN} exists with another content; --force replaces it"
                )));
            }
            (wanted, _) => wanted,
        };
        Ok(Some(Self {
            program,
            config: answers.config.clone(),
            unit,
        }))
    }

    /// Makes the user and the data folder, writes the unit, and checks that this user can use the
    /// configuration.
    pub(super) fn install(&self, config: &Config) -> Result<(), Failure> {
        if !run("id", &["--user", USER])?.status.success() {
            let home = [
                "--home-dir",
                DATA_DIR_OF_ROOT,
                "--shell",
                "/usr/sbin/nologin",
            ];
            succeed(
                "useradd",
                &[&["--system", "--user-group"][..], &home, &[USER]].concat(),
            )?;
            say(&format!("User {USER}: created."))?;
        }
        make_data_dir(&config.data_dir, &user()?)?;
        if let Some(unit) = &self.unit {
            put(Path::new(OWN), unit)?;
            say(&format!("{OWN}: written."))?;
        }
        succeed("systemctl", &["daemon-reload"])?;
        let program = self.program.display().to_string();
        let path = self.config.display().to_string();
        let as_user = [
            "-u", USER, "--", &program, "serve", "--check", "--config", &path,
        ];
        succeed("runuser", &as_user).map(drop).map_err(|failure| {
            Failure::Usage(format!(
                "{}\n  The gateway runs as the user {USER}, which must be able to read all files \
                 of its configuration",
                failure.message()
            ))
        })
    }

    /// Starts the service now and at each boot, again if its files have changed, and waits until it
    /// is ready.
    pub(super) fn start(&self, config: &Config, is_changed: bool) -> Result<(), Failure> {
        let verb = if is_changed || self.unit.is_some() {
            "restart"
        } else {
            "start"
        };
        let started = succeed("systemctl", &["enable", UNIT_NAME])
            .and_then(|_| succeed("systemctl", &[verb, UNIT_NAME]))
            .and_then(|_| AdminAddress::of(config, None).map_err(Failure::Usage))
            .and_then(|address| healthy::wait(&address, READY_WITHIN).map_err(Failure::Run));
        started.map_err(|failure| {
            let journal = run(
                "journalctl",
                &[
                    "--no-pager",
                    "--output=cat",
                    "--lines=20",
                    "--unit",
                    UNIT_NAME,
                ],
            );
            let journal =
                journal.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            let journal = journal.unwrap_or_else(|failure| failure.message().to_owned());
            Failure::Run(format!(
                "{}\nThe journal of {UNIT_NAME} ends with:\n{}",
                failure.message(),
                journal.trim_end()
            ))
        })
    }
}

/// The unit of the package, for a program, a configuration and a data folder elsewhere.
fn unit_text(program: &Path, config: &Path, data_dir: &Path) -> String {
    let program = program.display().to_string();
    let config = config.display().to_string();
    let text = UNIT
        .replace("/usr/bin/gw-gateway", &program)
        .replace(CONFIG_OF_ROOT, &config);
    if data_dir == Path::new(DATA_DIR_OF_ROOT) {
        return text;
    }
    let strict = "ProtectSystem=strict\n";
    text.replace(
        strict,
        &format!("{strict}ReadWritePaths={}\n", data_dir.display()),
    )
}

/// Refuses a path that the gateway cannot see as a service, or that has a meaning of its own in a
/// unit.
fn check_reachable(path: &Path) -> Result<(), Failure> {
    let advice = match HIDDEN.iter().find(|folder| path.starts_with(folder)) {
        Some(folder) => {
            format!(
                "services do not see {folder}: install it elsewhere, such as in /usr/local/bin or \
                 /etc/gw"
            )
        }
        None if path.to_str().is_some_and(|text| text.bytes().all(is_plain)) => return Ok(()),
        None => "a unit of systemd can name only paths of letters, digits and /._+-@:".to_owned(),
    };
    let other = "or use --serve to run the gateway in the foreground";
    Err(Failure::Usage(format!(
        "init: {}: {advice}; {other}",
        path.display()
    )))
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"/._+-@:".contains(&byte)
}

/// The user of the gateway with all its groups.
pub(super) fn user() -> Result<FileOwner, Failure> {
    let ids = |option: &str| -> Result<Vec<u32>, Failure> {
        let output = succeed("id", &[option, USER])?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let ids = text.split(' ').map(str::parse).collect::<Result<_, _>>();
        ids.map_err(|_| Failure::Run(format!("id {option} {USER}: {text:?} is not a number")))
    };
    Ok(FileOwner::new(
        ids("--user")?[0],
        ids("--group")?[0],
        &ids("--groups")?,
    ))
}

/// Creates the data folder of the unit, if it is missing, for the unit's user, if there is one.
/// Another folder, or without that user, is left to the gateway.
pub(super) fn prepare_data_dir(path: &Path) -> Result<(), Failure> {
    let has_user = || run("id", &["--user", USER]).is_ok_and(|found| found.status.success());
    if path != Path::new(DATA_DIR_OF_ROOT) || path.exists() || !has_user() {
        return Ok(());
    }
    make_data_dir(path, &user()?)
}

/// Creates the data folder for `user`, if it is missing. A folder that exists stays as it is, and
/// must belong to `user` with all that is in it.
fn make_data_dir(path: &Path, user: &FileOwner) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        Failure::Run(format!(
            "{}: cannot be created for {USER}: {error}",
            path.display()
        ))
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {
            let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits().cast_signed();
            let folder = fs::OpenOptions::new()
                .read(true)
                .custom_flags(flags)
                .open(path)
                .map_err(failed)?;
            fchown(folder, Some(user.user()), Some(user.group())).map_err(failed)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let Some((foreign, owner)) = foreign_file(path, user.user()).map_err(failed)? else {
                return Ok(());
            };
            Err(Failure::Usage(format!(
                "init: {}: it exists and belongs to user {owner}, and the gateway runs as {USER}: \
                 name a folder that does not exist with --data-dir, or give this one to the \
                 gateway with `chown --recursive {USER}: {}`",
                foreign.display(),
                path.display()
            )))
        }
        Err(error) => Err(failed(error)),
    }
}

/// The first file of another user than `user` in a folder, which may be the folder itself, and its
/// owner.
fn foreign_file(folder: &Path, user: u32) -> io::Result<Option<(PathBuf, u32)>> {
    let mut unseen = vec![folder.to_owned()];
    while let Some(path) = unseen.pop() {
        let found = match fs::symlink_metadata(&path) {
            // A gateway that runs deletes files.
            Err(error) if error.kind() == io::ErrorKind::NotFound && path != folder => continue,
            found => found?,
        };
        if found.uid() != user {
            return Ok(Some((path, found.uid())));
        }
        if found.is_dir() {
            for entry in fs::read_dir(&path)? {
                unseen.push(entry?.path());
            }
        }
    }
    Ok(None)
}

fn run(program: &str, arguments: &[&str]) -> Result<Output, Failure> {
    let output = Command::new(program).args(arguments).output();
    output.map_err(|error| Failure::Run(format!("{program}: {error}")))
}

/// Runs a command that must succeed.
fn succeed(program: &str, arguments: &[&str]) -> Result<Output, Failure> {
    let output = run(program, arguments)?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::Run(format!(
        "{program} {}: {}: {}",
        arguments.join(" "),
        output.status,
        said.trim()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_names_program_configuration_and_data_folder() {
        let program = Path::new("/usr/local/bin/gw-gateway");
        let unit = unit_text(program, Path::new("/srv/gw.toml"), Path::new("/srv/gw"));
        for line in [
            "ExecStart=/usr/local/bin/gw-gateway serve --config /srv/gw.toml",
            "ReadWritePaths=/srv/gw",
            "User=gw-gateway",
        ] {
            assert!(unit.lines().any(|it| it == line), "{line}: {unit}");
        }
        let unit = unit_text(
            Path::new("/usr/bin/gw-gateway"),
            Path::new(CONFIG_OF_ROOT),
            Path::new(DATA_DIR_OF_ROOT),
        );
        assert_eq!(unit, UNIT);
    }

    #[test]
    fn paths_that_the_service_does_not_see_are_refused() {
        for hidden in [
            "/root/gw/target/release/gw-gateway",
            "/home/ann/gateway.toml",
            "/tmp/gw",
        ] {
            let message = check_reachable(Path::new(hidden))
                .unwrap_err()
                .message()
                .to_owned();
            assert!(
                message.contains(hidden) && message.contains("--serve"),
                "{message}"
            );
        }
        assert!(check_reachable(Path::new("/srv/with space")).is_err());
        assert!(check_reachable(Path::new("/srv/100%")).is_err());
        for fine in [
            "/usr/local/bin/gw-gateway",
            "/etc/gw/gateway.toml",
            "/var/lib/gw-gateway",
            "/homes/gw",
        ] {
            assert!(check_reachable(Path::new(fine)).is_ok(), "{fine}");
        }
    }

    #[test]
    fn only_a_new_data_folder_gets_an_owner() {
        if !rustix::process::geteuid().is_root() {
            // Not `eprintln!`: the test harness hides its output of tests that pass.
            io::Write::write_all(&mut io::stderr(), b"init::systemd: skipped: needs root\n")
                .unwrap();
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let user = FileOwner::new(23456, 23457, &[]);
        let new = folder.path().join("above/data");
        make_data_dir(&new, &user).unwrap();
        make_data_dir(&new, &user).unwrap();
        let owner = |path: &Path| {
            fs::metadata(path)
                .map(|found| (found.uid(), found.gid(), found.mode() & 0o777))
                .unwrap()
        };
        assert_eq!(owner(&new), (23456, 23457, 0o700));
        assert_eq!(owner(new.parent().unwrap()).0, 0);

        let foreign = folder.path().join("foreign");
        fs::create_dir(&foreign).unwrap();
        fs::write(foreign.join("file"), "").unwrap();
        let message = make_data_dir(&foreign, &user)
            .unwrap_err()
            .message()
            .to_owned();
        assert!(
            message.contains("it exists and belongs to user 0") && message.contains("--data-dir"),
            "{message}"
        );
        assert_eq!((owner(&foreign).0, owner(&foreign.join("file")).0), (0, 0));

        // A gateway that root has run left a file behind.
        fs::create_dir(new.join("below")).unwrap();
        std::os::unix::fs::chown(new.join("below"), Some(23456), Some(23457)).unwrap();
        fs::write(new.join("below/file"), "").unwrap();
        let message = make_data_dir(&new, &user).unwrap_err().message().to_owned();
        assert!(
            message.contains("above/data/below/file: it exists and belongs to user 0")
                && message.contains("`chown --recursive gw-gateway: "),
            "{message}"
        );
    }

    #[test]
    fn a_command_that_fails_is_named_with_its_error() {
        let failure = succeed("ls", &["/nowhere"]).unwrap_err();
        let message = failure.message();
        assert!(
            message.starts_with("ls /nowhere: ") && message.contains("No such file"),
            "{message}"
        );
    }
}
