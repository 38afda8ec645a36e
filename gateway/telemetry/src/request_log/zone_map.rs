//! Zone maps: summaries of blocks, by which a search skips blocks without decoding them.

/// Summary of some records: one bit for each class of status, for gateway errors, for failed
/// attempts, and for groups of statuses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ZoneMap {
    /// Bits of [`ZoneMap::NO_STATUS`], [`ZoneMap::class`], [`ZoneMap::CODE`], [`ZoneMap::status`]
    /// and [`ZoneMap::ATTEMPTS`].
    pub(super) bits: u64,
    /// The longest total duration, in microseconds.
    pub(super) longest_us: u64,
}

impl ZoneMap {
    /// Bit for requests without a response.
    pub(super) const NO_STATUS: u64 = 1;
    /// Bit for gateway errors.
    pub(super) const CODE: u64 = 1 << 6;
    const STATUS_SHIFT: u32 = 7;
    const STATUSES: u16 = 56;
    /// Bit for failed attempts.
    pub(super) const ATTEMPTS: u64 = 1 << 63;

    /// Bit for a class of statuses, such as 5 for 5xx.
    pub(super) fn class(hundreds: u16) -> u64 {
        1 << hundreds.clamp(1, 5)
    }

    /// Bit for one status. Several statuses share a bit.
    pub(super) fn status(status: u16) -> u64 {
        1 << (Self::STATUS_SHIFT + u32::from(status % Self::STATUSES))
    }

    pub(super) fn add(&mut self, status: Option<u16>, has_code: bool, total_us: u64) {
        self.bits |= status.map_or(Self::NO_STATUS, |status| {
            Self::class(status / 100) | Self::status(status)
        });
        self.bits |= if has_code { Self::CODE } else { 0 };
        self.longest_us = self.longest_us.max(total_us);
    }

    /// Values of the SQL columns.
    pub(super) fn columns(self) -> [i64; 2] {
        [
            self.bits as i64,
            i64::try_from(self.longest_us).unwrap_or(i64::MAX),
        ]
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.bits |= other.bits;
        self.longest_us = self.longest_us.max(other.longest_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Condition of the searches' SQL.
    fn may_have(zone_map: ZoneMap, wanted: u64, min_us: u64) -> bool {
        zone_map.bits & wanted == wanted && zone_map.longest_us >= min_us
    }

    #[test]
    fn zone_map_matches_the_records_in_it() {
        let mut zone_map = ZoneMap::default();
        zone_map.add(Some(502), true, 7);
        let mut other = ZoneMap::default();
        other.add(None, false, 9);
        zone_map.merge(other);
        for wanted in [
            0,
            ZoneMap::status(502),
            ZoneMap::class(5),
            ZoneMap::CODE,
            ZoneMap::NO_STATUS,
        ] {
            assert!(may_have(zone_map, wanted, 9));
        }
        for wanted in [ZoneMap::status(200), ZoneMap::class(2)] {
            assert!(!may_have(zone_map, wanted, 0));
        }
        assert!(!may_have(zone_map, 0, 10));
        // The bits of all statuses are between the others.
        for status in 0..=999 {
            assert!(
                ZoneMap::status(status) > ZoneMap::CODE
                    && ZoneMap::status(status) < ZoneMap::ATTEMPTS
            );
        }
    }
}
