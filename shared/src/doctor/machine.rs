//! Checks of the machine that both programs need.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, getrlimit};

use super::Examination;
use crate::runtime::{self, Driver};

/// Oldest supported kernel, and the oldest one that does not count rings as locked memory.
const KERNEL_FLOOR: (u32, u32) = (5, 11);
const KERNEL_WITHOUT_MEMLOCK: (u32, u32) = (5, 12);
/// Locked memory that the rings of all cores need on older kernels, in bytes; a generous estimate.
const MEMLOCK: u64 = 64 * 1024 * 1024;

/// Free space below which the verdict is a warning, or a failure, in bytes.
const SPACE_WARNING: u64 = 1024 * 1024 * 1024;
const SPACE_FAILED: u64 = 64 * 1024 * 1024;

/// Time since the Unix epoch when this was written. A clock before it was never set.
const CLOCK_MIN: Duration = Duration::from_secs(1_790_000_000);

/// Checks kernel, reactor, limits and clock. `open_files` is the number of files that the program
/// may open.
pub fn examine(out: &mut Examination, open_files: u64) {
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    let kernel = kernel_version(&release);
    match kernel {
        Some(version) if version < KERNEL_FLOOR => {
            out.failed("kernel", release, "Linux 5.11 or newer is needed");
        }
        Some(_) => out.ok("kernel", release),
        None => out.warning(
            "kernel",
            release,
            "its version cannot be read; Linux 5.11 or newer is needed",
        ),
    }
    reactor(out);
    match getrlimit(Resource::Nofile).maximum {
        Some(most) if most < open_files => out.warning(
            "open files",
            format!("at most {most} (ulimit -Hn)"),
            format!(
                "raise the limit to {open_files}: LimitNOFILE={open_files} in the unit; \
                     connections are refused beyond it"
            ),
        ),
        most => out.ok(
            "open files",
            most.map_or("no limit".to_owned(), |most| {
                format!(
                    "at most \
            {most}"
                )
            }),
        ),
    }
    locked_memory(out, kernel);
    clock(out, SystemTime::now());
}

/// Reports whether the program may leave core dumps.
pub fn core_dumps(out: &mut Examination, are_allowed: bool) {
    const CHECK: &str = "core dumps";
    if are_allowed {
        let advice = "remove core_dumps from the configuration unless you debug, and delete the \
                      dumps that exist";
        out.warning(CHECK, "allowed: they hold keys and tokens", advice);
    } else {
        out.ok(CHECK, "refused");
    }
}

fn reactor(out: &mut Examination) {
    const HELP: &str = "allow io_uring: kernel.io_uring_disabled=0, and a seccomp profile that \
                        allows io_uring_setup, io_uring_enter and io_uring_register; on epoll each \
                        request costs more";
    match Driver::choose() {
        Ok(driver @ Driver::IoUring(_)) => {
            let operations = runtime::ring_operations().unwrap_or_default();
            let missing: Vec<&str> = operations
                .iter()
                .filter(|(_, there)| !there)
                .map(|(name, _)| *name)
                .collect();
            let missing = if missing.is_empty() {
                String::new()
            } else {
                format!("; without {}", missing.join(", "))
            };
            out.ok("reactor", format!("{driver}{missing}"));
        }
        Ok(driver @ Driver::Epoll { .. }) => out.warning("reactor", driver.to_string(), HELP),
        Err(error) => out.failed("reactor", error.to_string(), HELP),
    }
}

fn locked_memory(out: &mut Examination, kernel: Option<(u32, u32)>) {
    if kernel.is_none_or(|version| version >= KERNEL_WITHOUT_MEMLOCK) {
        return out.ok("locked memory", "this kernel does not count rings");
    }
    match getrlimit(Resource::Memlock).current {
        Some(most) if most < MEMLOCK => out.warning(
            "locked memory",
            format!("at most {} KiB", most / 1024),
            "before Linux 5.12 rings count as locked memory: LimitMEMLOCK=infinity in the unit",
        ),
        _ => out.ok("locked memory", "enough for rings"),
    }
}

fn clock(out: &mut Examination, now: SystemTime) {
    let since_epoch = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    if since_epoch < CLOCK_MIN {
        out.failed(
            "clock",
            format!(
                "{} seconds since 1970: before this program was built",
                since_epoch.as_secs()
            ),
            "set it, and synchronise it with NTP: the validity of certificates and tokens depends \
             on it",
        );
    } else {
        out.ok("clock", "after this program was built");
    }
}

/// Checks that a kernel setting is at least `least`. `file` is relative to `/proc/sys`; the last of
/// several numbers counts.
pub fn setting(out: &mut Examination, file: &str, least: u64, why: &str) {
    let name = file.replace('/', ".");
    let value = fs::read_to_string(Path::new("/proc/sys").join(file)).ok();
    let value = value.and_then(|text| text.split_whitespace().next_back()?.parse::<u64>().ok());
    match value {
        Some(value) if value < least => {
            out.warning(
                &name,
                value.to_string(),
                format!("{why}: sysctl -w {name}={least} or more"),
            );
        }
        Some(value) => out.ok(name, value.to_string()),
        // Containers see few settings.
        None => out.ok(name, "cannot be read here"),
    }
}

/// Checks a folder of the program: its mode, write access and free space. The program creates a
/// missing folder if it can.
pub fn folder(out: &mut Examination, check: &str, path: &Path) {
    let name = path.display();
    let Ok(metadata) = fs::metadata(path) else {
        // The last ancestor of a relative path is empty.
        let here = |parent: &'_ Path| match parent.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => parent.to_owned(),
        };
        let parent = path
            .ancestors()
            .skip(1)
            .map(here)
            .find(|parent| parent.exists());
        match parent {
            Some(parent) if rustix::fs::access(&parent, rustix::fs::Access::WRITE_OK).is_ok() => {
                out.ok(check, format!("{name}: will be created"));
            }
            _ => out.failed(
                check,
                format!("{name}: does not exist and cannot be created"),
                "create it, and give it to the user that runs this program",
            ),
        }
        return;
    };
    if !metadata.is_dir() {
        return out.failed(check, format!("{name}: not a folder"), "set it to a folder");
    }
    if rustix::fs::access(
        path,
        rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
    )
    .is_err()
    {
        let owner = metadata.uid();
        let advice = if owner == rustix::process::geteuid().as_raw() {
            format!("chmod 700 {name}, and check that its file system can be written")
        } else {
            format!(
                "it belongs to user {owner}: run this command as that user, such as with `sudo -u \
                 '#{owner}'`, or name another folder"
            )
        };
        return out.failed(check, format!("{name}: cannot be written"), advice);
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        let advice = format!("it contains keys: chmod 700 {name}");
        out.warning(
            check,
            format!("{name}: other users may read it (mode {mode:03o})"),
            advice,
        );
    }
    match rustix::fs::statvfs(path) {
        Err(error) => out.warning(
            check,
            format!("{name}: free space is unknown: {error}"),
            "check the file system",
        ),
        Ok(space) => free_space(
            out,
            check,
            &name.to_string(),
            space.f_bavail.saturating_mul(space.f_frsize),
        ),
    }
}

fn free_space(out: &mut Examination, check: &str, name: &str, bytes: u64) {
    let found = format!("{name}: {} MiB free", bytes / 1024 / 1024);
    match bytes {
        ..SPACE_FAILED => {
            out.failed(
                check,
                found,
                "free some space: on a full disk the program can save and log nothing",
            );
        }
        SPACE_FAILED..SPACE_WARNING => {
            out.warning(check, found, "free some space before the disk is full");
        }
        _ => out.ok(check, found),
    }
}

/// Major and minor version of a release such as `6.18.0-rc1+deb`.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|character: char| !character.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::doctor::Verdict;

    fn verdict(examine: impl FnOnce(&mut Examination)) -> (Verdict, String) {
        let mut out = Examination::default();
        examine(&mut out);
        let finding = &out.checks()[0];
        (finding.verdict, finding.found.clone())
    }

    #[test]
    fn kernels_are_compared_by_number() {
        assert_eq!(kernel_version("6.18.0-rc1+deb13-amd64"), Some((6, 18)));
        assert_eq!(kernel_version("5.4"), Some((5, 4)));
        assert_eq!(kernel_version("WSL"), None);
        assert!(kernel_version("5.9.1") < Some(KERNEL_FLOOR));
    }

    #[test]
    fn this_machine_passes_every_check() {
        let mut out = Examination::default();
        examine(&mut out, 64);
        assert!(out.is_good(), "{out:?}");
        let checks = out.checks().iter().map(|finding| &finding.check);
        assert!(checks.eq(["kernel", "reactor", "open files", "locked memory", "clock"]));
    }

    #[test]
    fn a_clock_that_was_never_set_fails() {
        assert_eq!(verdict(|out| clock(out, UNIX_EPOCH)).0, Verdict::Failed);
        let set = verdict(|out| clock(out, UNIX_EPOCH + CLOCK_MIN));
        assert_eq!(set.0, Verdict::Ok);
    }

    #[test]
    fn rings_need_locked_memory_before_linux_5_12() {
        let new = verdict(|out| locked_memory(out, Some((6, 1))));
        assert_eq!(new.0, Verdict::Ok);
        let old = verdict(|out| locked_memory(out, Some((5, 11))));
        assert!(!old.1.contains("does not count rings"), "{old:?}");
    }

    #[test]
    fn folders_must_be_private_writable_and_not_full() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("data");
        let of_folder = || verdict(|out| folder(out, "data", &path));
        let to_create = format!("{}: will be created", path.display());
        assert_eq!(of_folder(), (Verdict::Ok, to_create));
        fs::write(&path, "").unwrap();
        assert_eq!(of_folder().0, Verdict::Failed);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let (open, found) = of_folder();
        assert!(open == Verdict::Warning && found.contains("755"), "{found}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(of_folder().1.contains("MiB free"));
    }

    #[test]
    fn little_free_space_is_warned_of() {
        for (bytes, expected) in [
            (0, Verdict::Failed),
            (SPACE_FAILED, Verdict::Warning),
            (SPACE_WARNING, Verdict::Ok),
        ] {
            let (found, _) = verdict(|out| free_space(out, "data", "x", bytes));
            assert_eq!(found, expected, "{bytes}");
        }
    }

    #[test]
    fn kernel_settings_below_the_minimum_are_warned_of() {
        for (name, minimum, expected) in [
            ("kernel/pid_max", 1, Verdict::Ok),
            ("kernel/pid_max", u64::MAX, Verdict::Warning),
            ("no/such", 1, Verdict::Ok),
        ] {
            let (found, _) = verdict(|out| setting(out, name, minimum, "x"));
            assert_eq!(found, expected, "{name} {minimum}");
        }
    }
}
