//! The service of systemd, which may do more than the user that runs `doctor`. Read from its files:
//! `systemctl` needs D-Bus, except for root.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const UNIT: &str = "gw-gateway.service";
/// Where systemd looks for units. A file hides those of the same name in later folders
/// (systemd.unit(5)).
const FOLDERS: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Whether the unit lets the gateway bind ports below 1024. `false` where it is not installed.
pub(super) fn may_bind_low_ports() -> bool {
    grants_low_ports(&unit_in(&FOLDERS.map(Path::new)))
}

/// The text of the unit with its drop-ins, in the order of their names; empty if there is no unit.
fn unit_in(folders: &[&Path]) -> String {
    let read = |folder: &&Path| fs::read_to_string(folder.join(UNIT)).ok();
    let Some(mut text) = folders.iter().find_map(read) else {
        return String::new();
    };
    let mut parts = BTreeMap::new();
    for folder in folders {
        let entries = fs::read_dir(folder.join(format!("{UNIT}.d")));
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_string_lossy().ends_with(".conf") {
                parts.entry(name).or_insert_with(|| entry.path());
            }
        }
    }
    for path in parts.values() {
        text.push('\n');
        text += &fs::read_to_string(path).unwrap_or_default();
    }
    text
}

/// Whether a unit has the capability in the end: an assignment adds, `~` removes, and an empty one
/// removes all (systemd.exec(5)).
fn grants_low_ports(unit: &str) -> bool {
    let mut is_granted = false;
    for set in unit
        .lines()
        .filter_map(|line| line.trim().strip_prefix("AmbientCapabilities="))
    {
        let (removes, names) = match set.strip_prefix('~') {
            Some(names) => (true, names),
            None => (false, set),
        };
        let has = names
            .split_whitespace()
            .any(|name| name.eq_ignore_ascii_case("CAP_NET_BIND_SERVICE"));
        if has || names.trim().is_empty() {
            is_granted = has && !removes;
        }
    }
    is_granted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_that_is_in_force_has_the_capability_or_not() {
        let packaged = include_str!("../../../../packaging/systemd/gw-gateway.service");
        for (unit, expected) in [
            (packaged, true),
            ("AmbientCapabilities=CAP_CHOWN cap_net_bind_service", true),
            ("AmbientCapabilities=CAP_CHOWN", false),
            ("#AmbientCapabilities=CAP_NET_BIND_SERVICE", false),
            ("CapabilityBoundingSet=CAP_NET_BIND_SERVICE", false),
            ("", false),
        ] {
            assert_eq!(grants_low_ports(unit), expected, "{unit}");
        }
        let folder = tempfile::tempdir().unwrap();
        let [own, packages] = ["own", "packages"].map(|name| folder.path().join(name));
        let parts = own.join("gw-gateway.service.d");
        fs::create_dir_all(&parts).unwrap();
        fs::create_dir_all(&packages).unwrap();
        let may = || grants_low_ports(&unit_in(&[&own, &packages]));
        // Drop-ins of a unit that is not installed.
        let adds = "[Service]\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n";
        fs::write(parts.join("1.conf"), adds).unwrap();
        assert!(!may());
        fs::write(packages.join(UNIT), "[Service]\nUser=gw\n").unwrap();
        assert!(may());
        fs::write(parts.join("2.conf"), "[Service]\nAmbientCapabilities=\n").unwrap();
        assert!(!may());
        fs::remove_dir_all(&parts).unwrap();
        fs::write(packages.join(UNIT), packaged).unwrap();
        assert!(may());
        fs::write(own.join(UNIT), "[Service]\n").unwrap();
        assert!(!may());
    }
}
