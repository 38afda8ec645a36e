//! Memory available to this process.

use std::fs;
use std::path::Path;

/// Default limit on the memory of all relayed requests: a quarter of `limit`. Close to the limit,
/// windows shrink to [`gw_shared::tunnel::window::LEAST`]. A request without room for that is
/// refused (503).
pub fn default_relay_memory() -> usize {
    limit() / 4
}

/// Memory limit of the process in bytes: the smaller of the machine's memory and the limits of its
/// control groups (cgroup v1 or v2).
pub(crate) fn limit() -> usize {
    let info = rustix::system::sysinfo();
    let physical = usize::try_from(info.totalram)
        .unwrap_or(usize::MAX)
        .saturating_mul(info.mem_unit as usize);
    cgroup_limit(
        &fs::read_to_string("/proc/self/cgroup").unwrap_or_default(),
        |path| fs::read_to_string(path).ok(),
    )
    .map_or(physical, |limit| limit.min(physical))
}

/// Smallest limit of the process's group and its ancestors. `membership` is the text of
/// `/proc/self/cgroup`: one `hierarchy:controllers:path` per line. In a container the path may be
/// invisible; the root is then the container's group.
fn cgroup_limit(membership: &str, read: impl Fn(&Path) -> Option<String>) -> Option<usize> {
    let groups = membership.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next()?;
        let path = parts.next()?.trim_start_matches('/');
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers
                .split(',')
                .any(|controller| controller == "memory") =>
            {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return None,
        };
        Some((Path::new(root), Path::new(root).join(path), file))
    });
    groups
        .flat_map(|(root, group, file)| {
            let files: Vec<_> = group
                .ancestors()
                .take_while(|folder| folder.starts_with(root))
                .map(|folder| folder.join(file))
                .collect();
            files
        })
        .filter_map(|file| read(&file)?.trim().parse().ok())
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit_of(membership: &str, files: &[(&str, &str)]) -> Option<usize> {
        cgroup_limit(membership, |path| {
            files
                .iter()
                .find(|(name, _)| Path::new(name) == path)
                .map(|(_, text)| format!("{text}\n"))
        })
    }

    #[test]
    fn the_smallest_limit_of_the_group_and_its_ancestors_applies() {
        let files = [
            ("/sys/fs/cgroup/a/b/memory.max", "max"),
            ("/sys/fs/cgroup/a/memory.max", "1000"),
            ("/sys/fs/cgroup/memory.max", "2000"),
            ("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "500"),
        ];
        assert_eq!(limit_of("0::/a/b\n", &files), Some(1000));
        assert_eq!(limit_of("0::/not/visible\n", &files), Some(2000));
        assert_eq!(
            limit_of("5:cpu,memory:/x\n4:cpuset:/a\n", &files),
            Some(500)
        );
        assert_eq!(limit_of("0::/a/b\n", &files[..1]), None);
        assert_eq!(limit_of("", &files), None);
    }

    #[test]
    fn the_limit_of_this_machine_is_read() {
        assert!(limit() > 1 << 20);
    }
}
